"""Pipelines beside their reference, here and on ranks, and verbs one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pdcompile
from tests.helpers.models import batch_for, loss_for

Call = Callable[..., tuple[int, str, str]]  # the fixture `call`: exit code, stdout, stderr
Build = Callable[[], nn.Module]

WORKLOAD = f"{Path(__file__).with_name('workload.py')}:build"  # the target of verbs
CLOSE = {"rtol": 0.0, "atol": 2e-5}
OPTIONS: dict[str, Any] = {
    "optimizer": partial(torch.optim.AdamW, lr=0.05), "max_grad_norm": 0.5,
}  # fmt: skip
#: without measurements and checks that tests of other things do not need
PLANNED: dict[str, Any] = {"costs": "estimated", "progress": False, "verify": "off"}

#: what scripts on ranks begin with
COMMON = r"""
import copy, os, signal, sys, time
from functools import partial
from pathlib import Path
import torch
from pdcompile.errors import *
from pdcompile.reference import reference
from tests.helpers import models
from tests.helpers.alike import compiled, train_alike
from tests.helpers.pipelines import by_hand, states_equal

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def pair(model, schedule, stages=world, ranks=(), **given):
    options = dict(loss_fn=models.loss_for(model), optimizer=partial(torch.optim.AdamW, lr=1e-2),
                   schedule=schedule, microbatches=4, **given)
    twin = copy.deepcopy(model)
    inputs, target = models.batch_for(model, 8)
    pipe = by_hand(model, stages, inputs, target, ranks=ranks, **options).prepare()
    return pipe, reference(twin, plan=pipe.plan, **options)

def say(*words):
    sys.stdout.write(" ".join((f"[{rank}]", *map(str, words))) + "\n")  # one write a line
    sys.stdout.flush()

def meet(place):  # all ranks have left the pipeline's calls before one of them fails in the next
    Path(f"{place}.{rank}").touch()
    while not all(Path(f"{place}.{r}").exists() for r in range(world)):
        time.sleep(0.01)
"""


def compiled(build: Build, **options: Any) -> pdcompile.Pipeline:
    """A pipeline for minibatches of eight samples, of the first plan that is found."""
    model = build()
    x, y = batch_for(model, 8)
    search = {} if "plan" in options else {"time_limit": 0}
    given = {**OPTIONS, **PLANNED, **search, "loss_fn": loss_for(model), **options}
    return pdcompile.compile(model, (x,), example_target=y, **given)


def close(ours: dict[str, Any], theirs: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    """States with the same names, equal up to the order of sums; names that end so are free."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if not name.endswith(but or ("no such name",)):
            torch.testing.assert_close(value, theirs[name], **CLOSE)


def train_alike(
    pipe: pdcompile.Pipeline,
    build: Build,
    *,
    sizes: Sequence[int] = (8, 3, 1, 8),
    atol: float = 0.0,
    everywhere: bool = False,
    **options: Any,
) -> None:
    """Minibatches of several sizes, a user's own loop, evaluation: as the reference, to the bit
    where nothing else is said.  Outputs are where the last stage is, or everywhere."""
    model = build()
    loss_fn = loss_for(model)
    given = {**OPTIONS, **options, "plan": pipe.plan}
    expected = pdcompile.reference(deepcopy(model), loss_fn=loss_fn, **given)
    alike = partial(torch.testing.assert_close, rtol=0.0, atol=atol)
    whole = len(pipe.stages) == len(pipe.plan.stages)
    last = everywhere or pipe.plan.stages[-1].ranks[0] in pipe.ranks
    for t, size in enumerate(sizes):
        x, y = batch_for(model, size, t)
        ours, theirs = (one.step(x, target=y) for one in (pipe, expected))
        alike(float(ours.loss), float(theirs.loss))
        if last:
            alike(ours.outputs, theirs.outputs)
    for one in (pipe, expected):
        one.forward_backward(x, target=y)
        one.clip_grad_norm_(0.1)
        one.optimizer.step()
        one.zero_grad()
        one.step(x, target=y)
    alike(pipe.full_state_dict(), expected.full_state_dict() if 0 in pipe.ranks or whole else {})
    ours, theirs = (one.eval_step(x, target=y) for one in (pipe, expected))
    alike(float(ours.loss), float(theirs.loss))
    alike(pipe.predict(x), expected.predict(x) if last else None)


def run_verbs(call: Call, *verbs: Sequence[str]) -> str:
    """Run verbs that succeed; what the last one printed."""
    for words in verbs:
        code, out, err = call(*words)
        assert code == 0, err
    return out
