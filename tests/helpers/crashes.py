"""Processes that are killed while they train and save, and what is then found on disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pdcompile.checkpoint.contents import Contents, open_checkpoint
from pdcompile.checkpoint.folder import newest
from pdcompile.checkpoint.manifest import Holding, HoldingKind
from pdcompile.errors import CheckpointError, PdcompileError
from tests.helpers.launch import processes, torchrun
from tests.helpers.pipelines import states_equal
from tests.helpers.resuming import pipeline, same, train

STEPS = 12


@dataclass
class Outcome:
    """Results of trials: what went wrong, in words; how many were judged, how often processes were
    killed, in a save too, and how often there was nothing yet."""

    wrong: list[str] = field(default_factory=list)
    found: int = 0
    kills: int = 0
    nothing: int = 0
    during_save: int = 0


def forked(run: Callable[[], None], seconds: float) -> bool:
    """Run something in a fork, and kill it after so many seconds; whether it ended before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            warnings.simplefilter("ignore")
            run()
            code = 0
        finally:
            os._exit(code)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"the process ended with {status}"
            return True
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0


def killed_saves(folder: Path, kills: int, seed: int) -> Outcome:
    """Kill processes that save after every minibatch; compare what is found with the training."""
    draw, outcome = random.Random(seed), Outcome()
    fresh, whole = pipeline("2bw", 2), pipeline("2bw", 2)
    states = []
    for t in range(STEPS):
        states.append(whole.full_state_dict())
        train(whole, t, t + 1)
    whole.close()

    def run(place: Path) -> None:
        for t in range(STEPS):
            fresh.save(place, keep=2)
            train(fresh, t, t + 1)

    began = time.monotonic()
    forked(lambda: run(folder / "whole"), 600)
    longest = time.monotonic() - began
    for trial in range(kills):
        place = folder / str(trial)
        place.mkdir()
        ended = forked(lambda place=place: run(place), draw.uniform(0, 0.9 * longest))  # type: ignore[misc]
        outcome.kills += not ended
        names = [one.name for one in place.iterdir()]
        outcome.during_save += any(name.startswith(".") for name in names)
        try:
            found = newest(place)
            if found is None:
                outcome.nothing += 1
            else:
                outcome.found += 1
                _compare(Contents(found), states, outcome)
        except PdcompileError as error:
            outcome.wrong.append(f"{names}: {error}")
        shutil.rmtree(place)
    return outcome


def _compare(contents: Contents, states: list[Any], outcome: Outcome) -> None:
    outcome.wrong += [str(error) for error in contents.verify()]
    expected = states[contents.position.minibatches]
    state = {name: contents.tensor(Holding(HoldingKind.WEIGHT, name)) for name in contents._weights}
    if states_equal(state, {name: expected[name] for name in contents._weights}):
        outcome.wrong.append(f"{contents.place} is not the training after its minibatches")


def killed_trainings(
    folder: Path, schedules: list[tuple[str, tuple[int, ...]]], trials: int, seed: int
) -> Outcome:
    """Kill trainings at random moments and resume them until they end; compare with one that
    never stopped.

    Args:
        schedules: each with the numbers of stages that a resumed training may have.
    """
    draw, outcome = random.Random(seed), Outcome()
    made = {(s, n): pipeline(s, n) for s, stages in schedules for n in stages}
    expected, longest = {}, dict[str, float]()
    for schedule, stages in schedules:
        whole = pipeline(schedule, stages[0])
        train(whole, 0, STEPS)
        expected[schedule] = whole.full_state_dict(), whole.full_optimizer_state_dict()
        whole.close()
    for trial in range(trials):
        schedule, stages = schedules[trial % len(schedules)]
        place, ended = folder / str(trial), False

        def run(pipe: Any, place: Path = place) -> None:
            if newest(place) is not None:
                pipe.load(place)
            for t in range(pipe.position.minibatches, STEPS):
                train(pipe, t, t + 1)
                if t % 2:
                    pipe.save(place, keep=2)

        if schedule not in longest:
            began = time.monotonic()
            forked(lambda run=run, pipe=made[schedule, stages[0]]: run(pipe), 600)  # type: ignore[misc]
            longest[schedule] = time.monotonic() - began
            shutil.rmtree(place)
        while not ended:
            pipe = made[schedule, draw.choice(stages)]
            ended = forked(lambda pipe=pipe: run(pipe), draw.uniform(0.0, longest[schedule]))  # type: ignore[misc]
            outcome.kills += not ended
            outcome.during_save += bool([*place.glob(".*")]) and not ended
        final = made[schedule, stages[0]]
        child = final.load(place)
        found = final.full_state_dict(), final.full_optimizer_state_dict()
        if final.position.minibatches != STEPS or not same(found, expected[schedule]):
            outcome.wrong.append(f"{schedule}: {child} differs")
        outcome.found += 1
        final.load_state_dict(_start(schedule), position=0)
        final.optimizer.state.clear()
        shutil.rmtree(place)
    return outcome


def _start(schedule: str) -> Any:
    fresh = pipeline(schedule, 2)
    state = fresh.full_state_dict()
    fresh.close()
    return state


def flipped_bits(folder: Path, count: int, seed: int) -> Outcome:
    """Flip single bits of a checkpoint's files: each has to be found, in its file and tensor."""
    draw, outcome = random.Random(seed), Outcome()
    pipe = pipeline("2bw", 2, tied=True)
    train(pipe, 0, 2)
    place = pipe.save(folder)
    pipe.close()
    files = sorted(place.iterdir())
    for trial in range(count):
        path = files[trial % len(files)]
        whole = path.read_bytes()
        bit = draw.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(damaged))
        try:
            found = open_checkpoint(folder).verify()
        except CheckpointError as error:
            found = [error]
        path.write_bytes(whole)
        said = len(found) == 1 and path.name in str(found[0].where)
        if said and path.suffix == ".safetensors":
            header = 8 + int.from_bytes(whole[:8], "little")
            said = bit // 8 < header or _tensor_at(whole, bit // 8 - header) in found[0].message
        if not said:
            outcome.wrong.append(f"bit {bit} of {path.name}: {found}")
        outcome.found += said
    outcome.wrong += [str(error) for error in open_checkpoint(folder).verify()]
    return outcome


def _tensor_at(data: bytes, offset: int) -> str:
    """The name of the tensor that a byte of a safetensors file belongs to."""
    listed = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    spans = ((name, one["data_offsets"]) for name, one in listed.items() if name != "__metadata__")
    return next(name for name, (first, end) in spans if first <= offset < end)


RANKS = """
    import os, random, signal, sys, threading
    from functools import partial
    from pathlib import Path
    import torch
    from tests.helpers.changes import batch
    from tests.test_resuming import compiled

    folder, schedule, replicas, seed, last = sys.argv[1:]
    folder, rank = Path(folder), int(os.environ["RANK"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    (folder / f"attempt.{attempt}").touch()
    draw = random.Random(f"{seed} {attempt}")
    victim = draw.randrange(int(os.environ["WORLD_SIZE"]))
    counts = tuple(map(int, replicas.split(",")))
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    saved = folder / "saved"
    pipe = compiled(saved, cluster="auto", schedule=schedule, optimizer=sgd, replicas=counts,
                    microbatches=1 if schedule in ("stash", "vsync") else 4, stages=len(counts))
    pipe.prepare(batch(0)[0], target=batch(0)[1])
    first = pipe.position.minibatches
    killed = draw.randrange(first, int(last)) if first < int(last) else first
    for t in range(first, int(last)):
        if seed != "none" and rank == victim and attempt < 5 and t == killed:
            wait = threading.Timer(draw.uniform(0.0, 0.2), os.kill, (os.getpid(), signal.SIGKILL))
            wait.daemon = True
            wait.start()
        pipe.step(batch(t)[0], target=batch(t)[1])
        pipe.save(saved, keep=2)
    state = pipe.full_state_dict()
    if state:
        torch.save(state, folder / "whole.pt")
    pipe.close()
"""
_ON_RANKS = [("2bw", "1,1"), ("1f1b", "1,1,1"), ("stash", "1,1"), ("2bw", "2,1"), ("vsync", "1,1")]


def killed_ranks(folder: Path, trials: int, seed: int, *, restarts: bool = False) -> Outcome:
    """Kill one of the ranks of a training and start all anew, until it ends.

    `restarts`: torchrun starts them anew by itself.
    """
    outcome, expected = Outcome(), {}
    for trial in range(trials):
        schedule, replicas = _ON_RANKS[trial % len(_ON_RANKS)]
        size = sum(map(int, replicas.split(",")))
        if (schedule, replicas) not in expected:
            expected[schedule, replicas] = _ended(
                folder / "whole", schedule, replicas, size, outcome
            )
        draw = random.Random(f"{seed}/{trial}")
        place = folder / str(trial)
        for attempt in range(20):
            number = "none" if attempt == 19 else str(draw.randrange(10**6))
            found = _ended(place, schedule, replicas, size, outcome, number, restarts=restarts)
            if found is not None or restarts:
                break
            outcome.kills += 1
            outcome.during_save += any((place / "saved").glob(".writing-*"))
        theirs = expected[schedule, replicas]
        if found is None or theirs is None:
            outcome.wrong.append(f"{schedule} {replicas}: never ended")
            continue
        most = 0.0 if size == replicas.count(",") + 1 else 2e-5
        for name, value in theirs.items():
            if not torch.allclose(found[name], value, rtol=0.0, atol=most):
                outcome.wrong.append(f"{schedule} {replicas}: {name} differs")
        outcome.found += 1
    return outcome


def _ended(
    place: Path, schedule: str, replicas: str, size: int, outcome: Outcome, seed: str = "none",
    *, restarts: bool = False,
) -> Any:  # fmt: skip
    """The state that a training has come to, None where it was killed."""
    place.mkdir(exist_ok=True)
    given = str(place), schedule, replicas, seed, "6"
    if restarts:
        run = torchrun(RANKS, size, place, *given, restarts=9)
    else:
        run = processes(RANKS, size, place, *given)
    if "CheckpointError" in run.output:
        outcome.wrong.append(run.output[-2000:])
    if run.code:
        return None
    outcome.kills += len([*place.glob("attempt.*")]) - 1
    found = torch.load(place / "whole.pt", weights_only=True)
    shutil.rmtree(place)
    return found
