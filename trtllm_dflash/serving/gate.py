"""The gate of the OpenAI gateway: open, closed to new requests while a server drains, or shut for all."""

from collections.abc import Callable


class Gate:
    """Access to the gateway: for all, for the requests that run, or for none. It may be used from any thread.

    Attributes:
        open: whether new requests are taken.
    """

    def __init__(self) -> None:
        self.open = True
        self._on_shut: list[Callable[[], None]] = []

    def on_shut(self, action: Callable[[], None]) -> None:
        """Has `action` called, on whatever thread, when the gate is shut."""
        self._on_shut.append(action)

    def close(self) -> None:
        """Refuses new requests from now on."""
        self.open = False

    def shut(self) -> None:
        """Ends the requests that run, too, with an error."""
        self.close()
        for action in self._on_shut:
            action()
