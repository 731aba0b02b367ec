"""Faults: ranks that fail on purpose, and what the others say and when they end.

Each case trains an MLP on some ranks under torchrun, and one rank fails at a drawn minibatch and
instruction.  This process knows which, when and how, and compares that with the report that the
ranks print: the verdict, the rank, how long after the fault the last process ended, and what is
left of them.

    python benchmarks/faults.py --cases 20
    python benchmarks/faults.py --cases 20 --torchrun
    python benchmarks/faults.py --cases 100 --write docs/failures.md
    python benchmarks/faults.py --overhead
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import select
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))  # also as `python benchmarks/faults.py`

from tests.helpers.launch import processes, torchrun

STALL, PROGRESS = 2.0, 3.0  # seconds; the defaults would make the cases long
#: kind of fault: verdict that is due, and seconds in which the last rank has to end
KINDS: dict[str, tuple[str, float]] = {
    "exception": ("crash", 1.0),
    "kill": ("crash", 1.0),
    "exit": ("crash", 1.0),
    "abort": ("crash", 1.0),
    "segmentation fault": ("crash", 1.0),
    "out of memory": ("out of memory", 1.0),
    "corrupt message": ("crash", 1.0),
    "stop": ("stall", STALL + 1.0),
    "lost message": ("deadlock", PROGRESS + 1.0),
    "slow": ("", 0.0),
}


@dataclass(frozen=True)
class Case:
    """One fault: `instruction` counts from the beginning of the call of minibatch `minibatch`."""

    kind: str
    ranks: int
    rank: int
    schedule: str
    minibatch: int
    instruction: int


@dataclass(frozen=True)
class Outcome:
    """End of one trial; `seconds` from the fault to the end of the last rank."""

    case: Case
    seconds: float
    found: tuple[str, int]  # verdict and rank, ("", -1) without a report
    reports: int
    left: tuple[str, ...]
    output: str

    @property
    def right(self) -> bool:
        """One report, with the verdict and, but for a deadlock, the rank."""
        verdict, _ = KINDS[self.case.kind]
        if not verdict:
            return self.found == ("", -1) and "done" in self.output
        rank = self.case.rank if verdict != "deadlock" else -1
        # Who receives a wrong message, or the next one in place of a lost one, says from whom.
        if "message" in self.case.kind and self.found[0] == "crash":
            said = f"from rank {self.case.rank} has ", f"rank {self.case.rank} is about to send "
            return any(one in self.output for one in said) and self.reports == 1
        return self.found == (verdict, rank) and self.reports == 1

    @property
    def good(self) -> bool:
        return self.right and self.in_time and not self.left

    @property
    def in_time(self) -> bool:
        verdict, limit = KINDS[self.case.kind]
        return not verdict or self.seconds <= limit


# -- a rank --------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """The program of the ranks; runs under torchrun."""
    import pdcompile
    from pdcompile.runtime.interpreter import Worker

    os.environ["PDCOMPILE_DEBUG"] = "messages"
    case = Case(**json.loads((folder / "case.json").read_text()))
    rank = int(os.environ["RANK"])
    (folder / f"process.{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(2 * case.ranks)]
    inputs = torch.randn(32, 64)
    pipe = pdcompile.compile(
        torch.nn.Sequential(*layers),
        inputs,
        example_target=inputs,
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        schedule=case.schedule,
        microbatches=4 if case.schedule != "stash" else 1,
        costs="estimated",
        verify="off",
        stall_timeout=STALL,
        progress_timeout=PROGRESS,
    )
    for minibatch in range(case.minibatch + 10):
        if rank == case.rank and minibatch == case.minibatch:
            arm(Worker, case, folder)
        pipe.step(inputs, target=inputs)
    pipe.close()
    print("done", flush=True)


def arm(worker: Any, case: Case, folder: Path) -> None:
    """Let the fault happen at the case's instruction of this rank's next call."""
    execute, seen = worker.execute, 0

    def executed(self: Any, ins: Any) -> None:
        nonlocal seen
        seen += 1
        due = seen > case.instruction
        if "message" in case.kind:
            due = due and ins.action.name == "SEND"
        elif case.kind == "slow":  # a wait that nobody ends is no slowness
            due = due and ins.action.phase.name == "COMPUTE"
        if not due:
            return execute(self, ins)
        worker.execute = execute
        (folder / "fault").write_text(f"{time.time()} {ins}")
        fault(case.kind, self, ins, partial(execute, self, ins))
        return None

    worker.execute = executed


def fault(kind: str, worker: Any, ins: Any, execute: Callable[[], None]) -> None:
    """Fail as `kind` says, in place of an instruction."""
    if kind == "exception":
        worker.current = ins
        raise ArithmeticError("a fault")
    if kind == "out of memory":
        worker.current = ins
        torch.empty(1 << 60, dtype=torch.uint8)
    ends: dict[str, Callable[[], Any]] = {
        "kill": partial(os.kill, os.getpid(), signal.SIGKILL),
        "stop": partial(os.kill, os.getpid(), signal.SIGSTOP),
        "exit": partial(os._exit, 0),
        "abort": os.abort,
        "segmentation fault": partial(ctypes.string_at, 0),
        "slow": partial(time.sleep, 1.5 * PROGRESS),
    }
    if kind in ends:
        ends[kind]()
        execute()
    elif kind == "lost message":
        *_, place = worker._bound(ins).args
        send, place.send = place.send, lambda *given: _Lost()
        execute()
        place.send = send
    else:  # a bit of a message, after its sender has noted the checksum
        from pdcompile.eager.digest import flat_bytes
        from pdcompile.runtime.transport.contract import HEADER_LENGTH

        link = worker.transport.control
        start = link.start

        def flipped(flat: Any, *given: Any, **named: Any) -> Any:
            if flat.tensor.nbytes != 8 * HEADER_LENGTH:  # no note
                flat_bytes(flat.wait())[0] ^= 1
            return start(flat, *given, **named)

        link.start = flipped
        execute()
        link.start = start


OVERHEAD = """
import os, time
import torch
from pdcompile.schedule import Action, Instruction
from tests.helpers import models
from tests.helpers.pipelines import by_hand

inputs, target = models.batch_for("gpt", 8)
pipe = by_hand(models.gpt(layers=4), 2, inputs, target, microbatches=4, schedule="1f1b",
               loss_fn=models.loss_for("gpt"),
               optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)).prepare()
for _ in range(20):
    pipe.step(inputs, target=target)
world = pipe._running.world
log, clock = world.peers.log, time.pthread_getcpuclockid(world.watchdog.ident)
before, cpu, began = log.last().serial, time.clock_gettime(clock), time.perf_counter()
for _ in range(200):
    pipe.step(inputs, target=target)
seconds = time.perf_counter() - began
watching = time.clock_gettime(clock) - cpu
entries = log.last().serial - before
ins, began = Instruction(Action.FORWARD, 0, 0, 1), time.perf_counter()
for _ in range(20_000):
    log.begin(ins, 7)
logging = (time.perf_counter() - began) / 20_000 * entries
pipe.close()
print(f"rank {os.environ['RANK']}: step {seconds / 200 * 1e3:.2f} ms, {entries / 200:.0f} entries; "
      f"log {logging / seconds:.2%}, watchdog {watching / seconds:.2%} of it", flush=True)
"""


class _Lost:
    """A message that never left."""

    def wait(self) -> None:
        return None


# -- the judge -----------------------------------------------------------------------------------


def run(case: Case, *, launched: bool) -> Outcome:
    """One case: under torchrun, or in forks of one process, whose ranks nobody ends but they."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(asdict(case)))
        before = set(shared())
        ends: list[float] = []
        waiting = threading.Thread(target=lambda: ends.append(ends_of(folder, case.ranks)))
        waiting.start()
        start = torchrun if launched else processes
        text = start(Path(__file__).read_text(), case.ranks, folder, "--rank-of", name).output
        waiting.join()
        fault = folder / "fault"
        began = float(fault.read_text().split()[0]) if fault.exists() else float("nan")
        left = [path for path in set(shared()) - before if not in_use(path)]
        left += [path.name for path in folder.glob("process.*") if running(path)]
        found = re.findall(r"^pdcompile: (.*?)(?: of rank (\d+))?: ", text, re.MULTILINE)
        verdict = (found[0][0], int(found[0][1] or -1)) if found else ("", -1)
        return Outcome(case, ends[0] - began, verdict, len(found), tuple(left), text)


def shared() -> Iterator[str]:
    """Files of shared memory that ranks have made."""
    return map(str, Path("/dev/shm").glob("pdcompile-*"))


def in_use(path: str) -> bool:
    """Whether a running process has it: another pipeline's, on the same machine."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if path in maps.read_text():
                return True
    return False


def running(path: Path) -> bool:
    return Path(f"/proc/{path.read_text()}").exists()


def ends_of(folder: Path, ranks: int) -> float:
    """The time at which the last rank has ended."""
    poll, waiting = select.poll(), set()
    for path in (folder / f"process.{rank}" for rank in range(ranks)):
        while not path.exists() or not path.read_text():
            time.sleep(0.01)
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(int(path.read_text()))
            poll.register(fd, select.POLLIN)
            waiting.add(fd)
    while waiting:
        for fd, _ in poll.poll():
            poll.unregister(fd)
            os.close(fd)
            waiting.remove(fd)
    return time.time()


def drawn(number: int, seed: int) -> Case:
    rng = random.Random(f"{seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    ranks = rng.choice([2, 3, 4])
    rank = rng.randrange(
        ranks - (kind in ("lost message", "corrupt message"))
    )  # the last sends no value
    schedule = rng.choice(["1f1b", "gpipe", "2bw", "zb-h1"])
    return Case(kind, ranks, rank, schedule, rng.randrange(1, 12), rng.randrange(12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=list(KINDS), help="kinds of faults")
    parser.add_argument("--overhead", action="store_true", help="what log and watchdog cost")
    parser.add_argument("--torchrun", action="store_true", help="start the ranks with torchrun")
    parser.add_argument("--show", action="store_true", help="print what the ranks printed")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        return train(given.rank_of)
    if given.overhead:
        with tempfile.TemporaryDirectory() as folder:
            return print(processes(OVERHEAD, 2, Path(folder)).output)
    cases = [drawn(number, given.seed) for number in range(10 * given.cases)]
    cases = [case for case in cases if case.kind in (given.only or KINDS)][: given.cases]
    outcomes = []
    for case in track(cases, "faults", console=Console(stderr=True)):
        outcomes.append(one := run(case, launched=given.torchrun))
        if given.show or not one.good:
            print(f"{one.case}: {one.found} after {one.seconds:.2f} s, left: {one.left}")
        if given.show:
            print(one.output, flush=True)
    text = table(outcomes)
    print(text)
    if given.write:
        page = given.write.read_text(encoding="utf-8")
        head, _, rest = page.partition("<!-- table -->\n")
        page = f"{head}<!-- table -->\n{text}\n{rest[rest.index('<!-- end -->') :]}"
        given.write.write_text(page, encoding="utf-8")
    return None


def table(outcomes: list[Outcome]) -> str:
    """Markdown: a line for each kind."""
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        by_kind[one.case.kind].append(one)
    lines = ["| fault | cases | named rightly | due, s | in time | median s | slowest s | left |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for kind, some in by_kind.items():
        seconds = [one.seconds for one in some]
        right, in_time = sum(one.right for one in some), sum(one.in_time for one in some)
        lines.append(
            f"| {kind} | {len(some)} | {right} | {KINDS[kind][1] or '–'} | {in_time}"
            f" | {statistics.median(seconds):.2f} | {max(seconds):.2f} | "
            f"{sum(bool(o.left) for o in some)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
