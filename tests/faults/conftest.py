"""The servers of the serving tests, for faults to happen to."""

from tests.serving.conftest import served_engine, server, triton  # noqa: F401
