"""Keys by which a repository's models name a request to each other; no client can make one.

A request with a key is one that another model watches over: so the engine does not ask Triton whether its client is
there. A client that could send a key would run to its end, unseen.
"""

import hashlib
import os
import secrets
from contextlib import suppress
from itertools import count
from pathlib import Path

from trtllm_dflash.marks import state

_MAC_BYTES = 4  # of a key's 8; the rest, but for the sign, is its number
_NUMBERS = 2**31


class RequestKeys:
    """Makes keys, and knows those that processes of models of the same Triton have made."""

    def __init__(self) -> None:
        self._secret = _shared_secret()
        self._numbers = count(secrets.randbelow(_NUMBERS))

    def make(self) -> int:
        """Makes a key that differs from the two thousand million before it; it fits in an INT64."""
        return self._key(next(self._numbers) % _NUMBERS)

    def knows(self, key: int) -> bool:
        """Whether a model of this Triton has made the key."""
        return key > 0 and key == self._key(key >> 8 * _MAC_BYTES)

    def _key(self, number: int) -> int:
        mac = hashlib.blake2b(number.to_bytes(8, "big"), key=self._secret, digest_size=_MAC_BYTES)
        return number << 8 * _MAC_BYTES | int.from_bytes(mac.digest(), "big")


def _shared_secret() -> bytes:
    """Makes what the processes that one Triton started agree on, and nobody knows who is not on this machine."""
    parent = os.getppid()
    facts = [str(parent).encode()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    facts.append(state(parent)[1].encode())  # when it started
    return hashlib.blake2b(b" ".join(facts)).digest()
