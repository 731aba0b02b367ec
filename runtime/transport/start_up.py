"""Start-up: the ranks of a pipeline meet through the store, before they are connected.

Rank 0 captures and plans meanwhile, which may take long, and other ranks read weights.  So a rank
that computes says so once a second, and a wait ends when no rank has got further for
`progress_timeout`: once they are connected, the watchdog sees to the same.

The plan travels with the sources of the stages, which every rank runs: in whatever form they are
sent, who can write them into the store runs code on every rank.  And torch.distributed's store
takes values from all who reach its port.  So rank 0 signs what it sends (`Seal`: HMAC-SHA256,
RFC 2104) with a key that no other user's processes know, and with a number that each rank draws for
this run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdcompile.errors import LaunchError, RankError, errors_as
from pdcompile.warn import warn

MAYBE = "?"  # ends the name of a fact that is compared where both ranks have it
LOOSE = "~"  # begins texts of a fact that ranks may have unlike, with a warning
_ABSENT = "not there"
_TICK_SECONDS = 1.0
_BUSY_SECONDS = 0.01  # of a processor, in a tick: of a process that waits our threads take less
_LONGEST_PAUSE = 0.05
_SHOWN = 4
_SLOW_SECONDS = 60.0


class StartUp:
    """One rank's side.  `timeout` is `progress_timeout` in seconds, None: never.

    Every rank makes one at the same point, and makes the same calls until it is over.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float | None) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._waits = False
        self._over = threading.Event()
        self._process = os.getpid()
        threading.Thread(
            target=self._beat, args=(store.clone(),), name="pdcompile start-up", daemon=True
        ).start()

    def over(self) -> None:
        """The ranks are connected, or this one has failed."""
        self._over.set()

    def __enter__(self) -> StartUp:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Tell the others of an error, after which this rank does not begin."""
        self.over()
        if error is None:
            return
        with suppress(RuntimeError):  # must not hide the error itself
            said = f"rank {self.rank} could not prepare the pipeline: "
            self.store.set("failed", f"{said}{type(error).__name__}: {error}")

    def tell(self, name: str, text: str) -> list[str]:
        """The texts of all ranks, by rank.  Raises as `wait`."""
        self.store.set(f"{name}/{self.rank}", text)
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self.wait(keys)
        return [str(self.store.get(key), "utf-8", "replace") for key in keys]

    def wait(self, keys: Sequence[str]) -> None:
        """Wait for keys that each rank sets, or for one of rank 0's.

        Raises:
            RankError: another rank has failed, or the store has gone.
            LaunchError: no rank has got further for `timeout`.
        """
        self._waits = True
        try:
            self._wait(keys)
        except RuntimeError as error:
            raise RankError(
                f"the store went away while rank {self.rank} waited for others: "
                f"{str(error).splitlines()[0]}",
                remedy="look at the error of the process that held it (rank 0, or torchrun)",
            ) from None
        finally:
            self._waits = False

    def _wait(self, keys: Sequence[str]) -> None:
        pause, looked, slow = 0.001, 0.0, _SLOW_SECONDS
        began = since = time.monotonic()
        known: list[object] = []
        beats = [f"beat/{rank}" for rank in range(self.size)]
        while not self.store.check([*keys]):
            now = time.monotonic()
            # Not where all have told, and one has raised what all will.
            if self.store.check(["failed"]) and not self.store.check([*keys]):
                raise RankError(str(self.store.get("failed"), "utf-8"))
            if now - looked > _TICK_SECONDS:
                # What changes as ranks get further.
                found = [self.store.get(key) if self.store.check([key]) else b"" for key in beats]
                found += [self.store.check([key]) for key in keys]
                looked = now
                since = since if found == known else now
                known = found
                if self._timeout is not None and now - since > self._timeout:
                    raise self._late(keys)
                if now - began > slow:
                    slow *= 2
                    line = f"pdcompile: rank {self.rank} waited {now - began:.0f} s for"
                    sys.stderr.write(f"{line} {self._missing(keys)} in start-up\n")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def _missing(self, keys: Sequence[str]) -> str:
        numbers = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
        ranks = [one for one in numbers if one.isdecimal()] or ["0"]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"

    def _late(self, keys: Sequence[str]) -> LaunchError:
        return LaunchError(
            f"rank {self.rank} waits for {self._missing(keys)} in start-up, and no rank has got "
            f"further for {self._timeout:.0f} s",
            remedy="see that every rank makes the same calls of pdcompile, in the same order, and "
            "that none waits for another in between (a barrier in forward, a call of rank 0 "
            "alone); where one takes longer to get here, give a larger progress_timeout= (None: "
            "wait for ever)",
        )

    def _beat(self, store: Any) -> None:
        """Tell the others once a tick that this rank computes."""
        used = time.process_time()
        with suppress(RuntimeError):  # the store has gone: who waits finds that
            while not self._over.wait(_TICK_SECONDS) and os.getpid() == self._process:
                before, used = used, time.process_time()
                if not self._waits and used - before > _BUSY_SECONDS:
                    store.set(f"beat/{self.rank}", str(used))

    def compare(self, name: str, facts: Mapping[str, str]) -> None:
        """Raise LaunchError, on every rank, where ranks have unlike facts.

        Facts have names; see `MAYBE` and `LOOSE`.  An empty text is not compared.
        """
        text = json.dumps(facts)
        if len(set(self.tell(name, hashlib.sha256(text.encode()).hexdigest()))) == 1:
            return
        all_facts = [json.loads(one) for one in self.tell(f"{name} in full", text)]
        for rank, theirs in enumerate(all_facts):
            refused, told = unlike(all_facts[0], theirs, rank)
            if refused:
                more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
                raise LaunchError(
                    f"rank {rank} runs another program than rank 0: "
                    f"{'; '.join(refused[:_SHOWN])}{more}",
                    remedy="build the same model on every rank, with the same packages, options, "
                    "loss and optimizer (what a rank may have of its own: device, loggers, hooks, "
                    "paths, and the values of weights, which are rank 0's)",
                )
            if told and self.rank == 0:
                warn(f"forward reads what ranks have unlike, and runs with rank 0's: {told[0]}")


def unlike(
    first: Mapping[str, str], other: Mapping[str, str], rank: int
) -> tuple[list[str], list[str]]:
    """Differences of another rank from rank 0: those to be refused, and those to be told."""
    refused: list[str] = []
    told: list[str] = []
    for name in dict.fromkeys((*max(first, other, key=len), *first, *other)):
        maybe = name.endswith(MAYBE)
        a, b = (facts.get(name, "" if maybe else _ABSENT) for facts in (first, other))
        loose = a.startswith(LOOSE) and b.startswith(LOOSE)
        a, b = a.removeprefix(LOOSE), b.removeprefix(LOOSE)
        if a == b or not (a and b):
            continue
        line = f"{name.removesuffix(MAYBE)} is {a} on rank 0, {b} on rank {rank}"
        (told if loose else refused).append(line)
    return refused, told


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
    with errors_as(LaunchError, "the key of this user cannot be made or read", path, _REMEDY):
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
