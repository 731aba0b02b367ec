"""Processes that are killed while they train and save, and what is then found on disk."""

from __future__ import annotations

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

from pdcompile.checkpoint.contents import Contents
from pdcompile.checkpoint.folder import newest
from pdcompile.errors import PdcompileError
from tests.helpers.pipelines import states_equal
from tests.helpers.resuming import pipeline, same, train

STEPS = 12


@dataclass
class Outcome:
    """Of trials: what went wrong, in words; how many ended as each of two ways."""

    wrong: list[str] = field(default_factory=list)
    found: int = 0
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
        forked(lambda place=place: run(place), draw.uniform(0, 0.9 * longest))  # type: ignore[misc]
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
    state = {name: contents.weight(name) for name in contents.names}
    if states_equal(state, {name: expected[name] for name in contents.names}):
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
    expected = {}
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

        while not ended:
            pipe = made[schedule, draw.choice(stages)]
            ended = forked(lambda pipe=pipe: run(pipe), draw.uniform(0.02, 0.5))  # type: ignore[misc]
            outcome.during_save += not ended
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
