"""Seal: what rank 0 sends to the others as code comes from it, and from nobody else.

The plan travels with the sources of the stages, which every rank runs: in whatever form they are
sent, who can write them into the store runs code on every rank.  And torch.distributed's store
takes values from all who reach its port.  So rank 0 signs what it sends (HMAC-SHA256, RFC 2104)
with a key that no other user's processes know, and with a number that each rank draws for this run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdcompile.errors import LaunchError, os_errors_as

VARIABLE = "PDCOMPILE_KEY"
_SHORTEST = 16  # characters of a key that a person gives
_KEY_BYTES = 32
_REMEDY = (
    f"give all ranks one secret: export {VARIABLE}=$(openssl rand -hex 16) before torchrun starts, "
    "the same value on every host"
)


class Seal:
    """One rank's side; every rank makes one at the same point.  `wait` waits for keys."""

    def __init__(
        self, store: Any, rank: int, size: int, wait: Callable[[list[str]], object]
    ) -> None:
        self._store, self._rank, self._wait = store, rank, wait
        self._keys = [f"drawn/{peer}" for peer in range(size)]
        self._key = key()
        self._drawn = secrets.token_hex(16)
        store.set(self._keys[rank], f"{self._drawn} {self._sign(self._drawn.encode()).hex()}")

    def check(self) -> None:
        """Raise LaunchError where ranks have unlike keys; returns when all ranks are there."""
        for rank, (drawn, signed) in enumerate(self._all()):
            if not hmac.compare_digest(signed, self._sign(drawn.encode()).hex()):
                raise LaunchError(
                    f"rank {rank} has another key than rank {self._rank}: it is another user's, or "
                    "on a host with another home folder",
                    remedy=_REMEDY,
                )

    def closed(self, payload: bytes) -> bytes:
        """The payload with its signature."""
        return self._sign(self._of_run() + payload) + payload

    def opened(self, sealed: bytes) -> bytes:
        """The payload; raises LaunchError where rank 0 has not sealed it in this run."""
        signed, payload = sealed[:_KEY_BYTES], sealed[_KEY_BYTES:]
        if not hmac.compare_digest(signed, self._sign(self._of_run() + payload)):
            raise LaunchError(
                f"what rank {self._rank} got in place of rank 0's plan is not signed with this "
                "run's key: somebody else wrote it, and nothing of it was read",
                remedy=_REMEDY,
            )
        return payload

    def _all(self) -> list[tuple[str, str]]:
        """Number that each rank has drawn, and its signature."""
        self._wait(self._keys)
        found = [str(self._store.get(name), "utf-8", "replace") for name in self._keys]
        pairs = [text.partition(" ") for text in found]
        return [(drawn, signed if signed.isascii() else "") for drawn, _, signed in pairs]

    def _of_run(self) -> bytes:
        drawn = [one for one, _ in self._all()]
        drawn[self._rank] = self._drawn  # whatever the store says
        return "/".join(drawn).encode() + b"\n"

    def _sign(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, hashlib.sha256)


def key() -> bytes:
    """`PDCOMPILE_KEY`, or else the key of this user, made at its first use.

    Raises:
        LaunchError: the variable is too short, or the user's key cannot be made or may be known
            to others.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return _of_user(Path.home() / ".config" / "pdcompile" / "key")
    if len(given) < _SHORTEST:
        raise LaunchError(
            f"{VARIABLE} has {len(given)} characters, and at least {_SHORTEST} are needed",
            remedy=_REMEDY,
        )
    return hashlib.sha256(given.encode()).digest()


def _of_user(path: Path) -> bytes:
    with os_errors_as(LaunchError, "the key of this user cannot be made or read", path, _REMEDY):
        if not path.exists():
            _make(path)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(handle, "rb") as file:
            of = os.fstat(handle)
            found = file.read(_KEY_BYTES + 1)
    private = stat.S_ISREG(of.st_mode) and of.st_uid == os.getuid() and not of.st_mode & 0o077
    if not private or len(found) != _KEY_BYTES:
        raise LaunchError(
            "this file is no key that only this user knows",
            where=str(path),
            remedy="delete it, and it is made anew (mode 0600); or " + _REMEDY,
        )
    return found


def _make(path: Path) -> None:
    """Write a new key; of several processes that do so at once, one does."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)  # its mode is 0600
    try:
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
