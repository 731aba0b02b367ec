"""Random trials: models, calls and changes between calls, against a plain loop or the reference.

    python benchmarks/between_calls.py [--trials 5000] [--first 0] [--jobs 2]
    python benchmarks/between_calls.py --cost

A trial draws a model, a cut, a schedule, an optimizer, and a sequence of calls with changes
between them (see docs/between_calls.md).  The same is done to a twin in plain PyTorch: gradient
accumulation by hand, and for 2bw gradients of the weights before the last update; models that draw
random numbers, or hold a weight on two stages, are compared with `pdcompile.reference`.  A trial
ends equal to the last bit, or refused by an error of pdcompile's own; anything else is printed with
its number, and the exit code is 1.

--cost prints what looking for changes adds to a step.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PDCOMPILE_CACHE", "off")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.eager.modes import in_mode
from tests.helpers import models
from tests.helpers.changes import CHANGES, Change, Rich, batch
from tests.helpers.loops import Normalised, accumulate
from tests.helpers.pipelines import states_equal


class Plain:
    """A training loop as a user writes it; `lag` 1: gradients of the weights before the last
    update, as 2bw promises."""

    def __init__(self, model: nn.Module, loss_fn: Any, make: Any, count: int, lag: int,
                 clip: float | None) -> None:  # fmt: skip
        self.model, self.loss_fn, self.count, self.lag, self.clip = model, loss_fn, count, lag, clip
        self.optimizer = make(list(model.parameters()))
        self._older: list[Tensor] | None = None

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.model.zero_grad()
        newest = [p.data for p in parameters]
        for p, data in zip(parameters, self._older or newest, strict=True):
            p.data = data
        loss = self.gradients(x, target)
        for p, data in zip(parameters, newest, strict=True):
            p.data = data
        if self.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip, foreach=False)
        if self.lag:
            self._older = [p.data.clone() for p in parameters]
        self.optimizer.step()
        self.model.zero_grad()
        return loss

    def gradients(self, x: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad(), in_mode(self.model, True):
            count = _count(self.model, self.count, len(x))
            return accumulate(self.model, x, target, count, self.loss_fn)

    def evaluate(self, x: Tensor, target: Tensor) -> Tensor:
        total: Any = None
        with torch.no_grad(), in_mode(self.model, False):
            for part, goal in self._parts(x, target):
                loss = self.loss_fn(self.model(part), goal) * (len(part) / len(x))
                total = loss if total is None else total + loss
        return total

    def _parts(self, x: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        count = min(self.count, len(x))
        yield from zip(x.tensor_split(count), target.tensor_split(count), strict=True)

    def load(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(state)
        self._older = None

    def full_state(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())


class Referenced:
    """`pdcompile.reference` behind the same few calls, for models that draw random numbers, or hold
    a weight on two stages."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.model, self.count = model, options["microbatches"]
        self.pipe = pdcompile.reference(model, **options)
        self.optimizer = self.pipe.optimizer

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        with in_mode(self.model, True):
            count = _count(self.model, self.count, len(x))
        self.pipe._num_microbatches = count  # an option of a whole training, as users give it
        try:
            return self.pipe.step(x, target=target).loss.wait()
        finally:
            self.pipe._num_microbatches = self.count

    def evaluate(self, x: Tensor, target: Tensor) -> Tensor:
        return self.pipe.eval_step(x, target=target).loss.wait()

    def load(self, state: dict[str, Tensor]) -> None:
        self.pipe.load_state_dict(state)

    def full_state(self) -> dict[str, Tensor]:
        return self.pipe.full_state_dict()


def _count(model: nn.Module, count: int, size: int) -> int:
    """The microbatches of `size` samples, of two at least where batch norm refuses a single one."""
    norms = any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm1d))
    return max(1, min(count, size // 2 if norms else size))


# -- what a trial draws ------------------------------------------------------------------------


def _groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
    wide = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": wide, "weight_decay": 0.3}, {"params": rest, "lr": 0.05}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr)


OPTIMIZERS: list[Any] = [
    torch.optim.AdamW, partial(torch.optim.AdamW, foreach=True), _groups,
    partial(torch.optim.SGD, momentum=0.9), partial(torch.optim.Adam, amsgrad=True),
]  # fmt: skip


def _rich(r: random.Random) -> tuple[nn.Module, Any, Any, bool]:
    model = Rich(r.random() < 0.5, seed=r.randint(0, 9))
    draws = r.random() < 0.3
    model.drop.p = 0.2 if draws else 0.0
    if r.random() < 0.2:
        model.norm.eval()
    if r.random() < 0.1:
        model.eval()
    return model, F.mse_loss, batch, draws


def _other(make: Callable[[], nn.Module]) -> Callable[[random.Random], Any]:
    def made(r: random.Random) -> tuple[nn.Module, Any, Any, bool]:
        model = make()
        return model, models.loss_for(model), lambda t, n: models.batch_for(model, n, t), False

    return made


MODELS = [_rich, _rich, _rich, _rich, _other(models.mlp), _other(models.convnet),
          _other(models.unet), _other(lambda: models.gpt(layers=1)),
          _other(lambda: models.gpt(layers=1, tied=False))]  # fmt: skip


def _write_all(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.95)


def _swap_signs(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data.neg_()  # a sum of bits would not notice


def _permute(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.detach().copy_(parameter.detach().flip(0))


def _hook(model: nn.Module, _: Any) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)


ANY_MODEL = [
    Change("all parameters written through .data", "values", _write_all),
    Change("all signs changed", "values", _swap_signs),
    Change("rows exchanged", "values", _permute),
    Change("a gradient hook", "optimizer", _hook),
]


class Different(Exception):
    """The pipeline and the plain loop disagree."""


def trial(seed: int) -> tuple[str, str]:
    """("equal" | "refused" | "different" | "raw", what was done or said)."""
    r = random.Random(seed)
    torch.manual_seed(0)
    model, loss_fn, data, draws = r.choice(MODELS)(r)
    schedule = r.choice(("1f1b", "2bw", "2bw", "gpipe"))
    stages, count = r.randint(1, 4), r.randint(1, 4)
    make = Normalised if r.random() < 0.03 else r.choice(OPTIMIZERS)
    options: dict[str, Any] = {
        "loss_fn": loss_fn, "optimizer": partial(make, lr=0.02), "schedule": schedule,
        "microbatches": count, "max_grad_norm": r.choice((None, None, 0.3)),
    }  # fmt: skip
    twin = copy.deepcopy(model)
    said = [f"{type(model).__name__} {schedule} {stages} stages {count} microbatches"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()  # earlier pipelines, whose warnings would come later
            pipe = pdcompile.compile(
                model, cluster=Cluster.local(stages), costs="estimated", progress=False, **options
            )
            _run(r, pipe, model, twin, options, data, draws, said)
            pipe.close()
    except pdcompile.PdcompileError as error:
        return ("refused" if error.remedy else "raw"), f"{said}: {error}"
    except Different as error:
        return "different", f"{said}: {error}"
    except Exception:
        return "raw", f"{said}: {traceback.format_exc(limit=-4)}"
    return "equal", ""


def _run(
    r: random.Random, pipe: Any, model: Any, twin: Any, options: dict[str, Any], data: Any,
    draws: bool, said: list[str],
) -> None:  # fmt: skip
    size = r.choice((8, 9, 12))
    x, y = data(0, size)
    pipe.prepare(x, target=y)
    other: Any = None
    saved: list[Any] = []
    for t in range(r.randint(2, 7)):
        if other is None:  # modes are settled when the pipeline is prepared
            other = _loop(twin, options, pipe.plan, draws)
        if t and r.random() < 0.5:
            _change(r, pipe, model, twin, other, said)
        n = size if r.random() < 0.8 else r.randint(1, size)
        x, y = data(t, n)
        call = r.choices(("step", "eval_step", "save", "load", "flush"), (7, 1, 1, 1, 1))[0]
        said.append(f"{call} of {n}")
        if call == "step":
            ours, theirs = pipe.step(x, target=y).loss.wait(), other.step(x, y)
        elif call == "eval_step":
            ours, theirs = pipe.eval_step(x, target=y).loss.wait(), other.evaluate(x, y)
        elif call == "flush":
            pipe.flush()
            continue
        elif call == "save":
            saved.append((copy.deepcopy(pipe.full_state_dict()), copy.deepcopy(other.full_state())))
            continue
        elif saved:
            pipe.load_state_dict(saved[-1][0])
            other.load(saved[-1][1])
            continue
        else:
            continue
        if not torch.equal(ours, theirs):
            raise Different(f"loss {float(ours)} and {float(theirs)}")
    found = states_equal(pipe.full_state_dict(), other.full_state())
    if found:
        raise Different(f"state {found}")


def _loop(twin: nn.Module, options: dict[str, Any], plan: pdcompile.Plan, draws: bool) -> Any:
    if draws or plan.tied:  # each stage sums the gradients of its own uses of a tied weight
        return Referenced(twin, {**options, "plan": plan})
    lag = int(options["schedule"] == "2bw")
    return Plain(twin, options["loss_fn"], options["optimizer"], options["microbatches"], lag,
                 options["max_grad_norm"])  # fmt: skip


def _change(
    r: random.Random, pipe: Any, model: Any, twin: Any, other: Any, said: list[str]
) -> None:
    rich = isinstance(model, Rich)
    refused = r.random() < 0.15
    kinds = [c for c in CHANGES if (c.kind == "structure") == refused] if rich else ANY_MODEL
    change = r.choice(kinds)
    if change.text.startswith("moments") and not isinstance(pipe.optimizer, torch.optim.Adam):
        return
    if change.text.startswith(("moments", "`optimizer.state")) and not pipe.optimizer.state:
        return  # its first update is still to come, and the loop's has been
    if change.text == "`optimizer.load_state_dict(…)`":
        return  # its moments have other names in other optimizers
    if r.random() < 0.6:
        pipe.flush()
        said.append("flush")
    said.append(change.text)
    change.make(model, pipe.optimizer)
    change.make(twin, other.optimizer)


# -- what it costs -----------------------------------------------------------------------------


def cost() -> None:
    """Seconds that a step spends on looking for changes, beside the step's own."""
    from pdcompile.runtime.watch.model_watch import ModelWatch
    from pdcompile.runtime.watch.optimizer_watch import OptimizerWatch

    spent = {"seconds": 0.0}
    for kind in (ModelWatch, OptimizerWatch):
        for name in ("check", "remember"):
            setattr(kind, name, _timed(getattr(kind, name), spent))
    print(f"{'model':34} {'schedule':8} {'step':>10} {'watching':>10} {'share':>7}")
    for width, layers, size, tokens in ((256, 2, 8, 128), (512, 4, 8, 256), (512, 4, 20, 256)):
        words = f"GPT {layers} x {width}, {size} x {tokens} tokens"
        for schedule in ("1f1b", "2bw"):
            model = models.gpt(layers=layers, width=width, vocab=8192, context=tokens)
            ids = torch.randint(0, 8192, (size, tokens))
            pipe = pdcompile.compile(
                model, loss_fn=models.token_loss, cluster=Cluster.local(2), microbatches=4,
                schedule=schedule, costs="estimated", verify="off", progress=False,
            )  # fmt: skip
            pipe.step(ids, target=ids)
            spent["seconds"] = 0.0
            start = time.perf_counter()
            for _ in range(5):
                pipe.step(ids, target=ids)
            step = (time.perf_counter() - start) / 5
            watch = spent["seconds"] / 5
            pipe.close()
            print(f"{words:34} {schedule:8} {step * 1e3:7.0f} ms {watch * 1e3:7.2f} ms "
                  f"{watch / step:7.2%}")  # fmt: skip


def _timed(function: Any, spent: dict[str, float]) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent["seconds"] += time.perf_counter() - start

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=5000, help="how many (default 5000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--cost", action="store_true", help="time the looking for changes instead")
    given = parser.parse_args()
    if given.cost:
        cost()
        return
    numbers = range(given.first, given.first + given.trials)
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    with ProcessPoolExecutor(given.jobs) as pool:
        found = pool.map(trial, numbers, chunksize=20)
        for number, (kind, words) in track(zip(numbers, found, strict=True), total=len(numbers),
                                           description="trials"):  # fmt: skip
            counts[kind] += 1
            if kind in ("different", "raw"):
                print(f"trial {number}: {kind}: {words}", flush=True)
    took = time.perf_counter() - start
    bad = counts["different"] + counts["raw"]
    print(f"{given.trials} trials in {took:.0f} s: {counts['equal']} equal to the last bit, "
          f"{counts['refused']} refused, {counts['different']} different in silence, "
          f"{counts['raw']} other errors")  # fmt: skip
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
