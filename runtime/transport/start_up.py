"""Start-up: the ranks of a pipeline meet through the store, before they are connected.

Rank 0 captures and plans meanwhile, which may take long, and other ranks read weights.  So a rank
that computes says so once a second, and a wait ends when no rank has got further for
`progress_timeout`: once they are connected, the watchdog sees to the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pdcompile.errors import LaunchError, RankError
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
        while not self.store.check([*keys]):
            now = time.monotonic()
            # Not where all have told, and one has raised what all will.
            if self.store.check(["failed"]) and not self.store.check([*keys]):
                raise RankError(str(self.store.get("failed"), "utf-8"))
            if now - looked > _TICK_SECONDS:
                looked, found = now, self._seen(keys)
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

    def _seen(self, keys: Sequence[str]) -> list[object]:
        """All that changes as ranks get further."""
        beats = [f"beat/{rank}" for rank in range(self.size)]
        said = [self.store.get(key) if self.store.check([key]) else b"" for key in beats]
        return [*said, *(self.store.check([key]) for key in keys)]

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
                    remedy="build the same model on every rank, with the same options, loss and "
                    "optimizer (what a rank may have of its own: device, loggers, hooks, paths, "
                    "and the values of weights, which are rank 0's)",
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
