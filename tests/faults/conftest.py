"""What the serving tests serve, for faults to happen to."""

from tests.serving.conftest import served_engine, triton  # noqa: F401
