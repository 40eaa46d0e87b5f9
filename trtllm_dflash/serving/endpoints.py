"""The addresses that a server listens at: the OpenAI API's, which may be the world's, and Triton's own."""

import errno
import random
import socket
from dataclasses import dataclass, fields, replace

from trtllm_dflash.errors import SettingsError

LOOPBACK = "127.0.0.1"

#: Ports of which one is taken where any will do: below those that the system gives to outgoing connections, one of
#: which could have it before the server listens there.
_ANY = range(20_000, 32_768)
_TRIES = 20


class PortTakenError(SettingsError):
    """Somebody listens at a port already."""


@dataclass(frozen=True)
class Endpoints:
    """The host and ports of a server. Port 0 means any free one; `chosen` names it.

    Attributes:
        host: where the OpenAI API listens.
        expose_triton: Triton and its metrics listen there too. They know no key and few limits; so by default they
            listen on loopback, whatever the host.
    """

    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    openai_port: int | None = None
    expose_triton: bool = False

    @property
    def http(self) -> str:
        return f"http://{self.triton}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{self.triton}:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        return f"http://{self.triton}:{self.metrics_port}/metrics"

    @property
    def openai(self) -> str | None:
        return None if self.openai_port is None else f"http://{_reachable(self.address)}:{self.openai_port}/v1"

    @property
    def triton(self) -> str:
        """An address of this host at which a client on it reaches Triton."""
        return _reachable(self.triton_address)

    @property
    def triton_address(self) -> str:
        """The address that Triton listens at."""
        return self.address if self.expose_triton or self.local else LOOPBACK

    @property
    def address(self) -> str:
        """The host as an IPv4 address, as Triton takes it.

        Raises:
            SettingsError: it has none.
        """
        if not self.host:  # it would be every address of the machine
            raise SettingsError("--host: is empty; 0.0.0.0 is every address of this machine")
        try:
            return socket.gethostbyname(self.host)
        except OSError:
            raise SettingsError(f"--host {self.host}: not an IPv4 address or a name of one") from None

    @property
    def local(self) -> bool:
        """Whether only this machine reaches the host."""
        return self.address.startswith("127.")

    def chosen(self) -> "Endpoints":
        """Chooses every port that is 0, and checks that all were free a moment ago.

        Raises:
            SettingsError: a port is taken, the host is not this machine's, or nothing would listen there.
        """
        if self.local and self.expose_triton:
            raise SettingsError(f"--expose-triton: only this machine reaches --host {self.host}; give another --host")
        if not self.local and not self.expose_triton and self.openai_port is None:
            raise SettingsError(
                f"--host {self.host}: nothing would listen there; give it --openai-port, or --expose-triton"
            )
        names = [field.name for field in fields(self) if field.name.endswith("_port")]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        flags = {name: "--" + name.replace("_", "-") for name in given}
        for port in given.values():
            twins = [flags[name] for name in given if port and given[name] == port]
            if len(twins) > 1:
                raise SettingsError(f"port {port} is given twice ({', '.join(twins)})")
        sockets: list[socket.socket] = []  # held until all are chosen, so that no two are the same
        try:
            for name, port in given.items():
                address = self.address if name == "openai_port" else self.triton_address
                sockets.append(self._bind(address, port, flags[name]) if port else self._bind_any(address, flags[name]))
                given[name] = sockets[-1].getsockname()[1]
        finally:
            for held in sockets:
                held.close()
        return replace(self, **given)

    def _bind_any(self, address: str, flag: str) -> socket.socket:
        for port in random.sample(_ANY, _TRIES):
            try:
                return self._bind(address, port, flag)
            except PortTakenError:
                continue
        return self._bind(address, 0, flag)

    def _bind(self, address: str, port: int, flag: str) -> socket.socket:
        attempt = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        attempt.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the server does: old connections do not count
        try:
            attempt.bind((address, port))
            attempt.listen()  # till then others that reuse addresses may bind it too
            return attempt
        except OSError as error:
            attempt.close()
            if error.errno == errno.EADDRINUSE:
                raise PortTakenError(f"port {port} is taken ({flag})") from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise SettingsError(f"--host {self.host}: not an address of this machine") from None
            raise SettingsError(f"{flag} {port}: {error.strerror}") from None


def _reachable(address: str) -> str:
    return LOOPBACK if address == "0.0.0.0" else address
