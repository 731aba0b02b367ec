"""Ways to train one chain of layers on several ranks: torch's, and pdcompile's schedules.

Every contestant makes its own copy of the model, on every rank at the same point.  Its `step`
trains on one minibatch; streams stay in flight until `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pdcompile
from pdcompile.cluster import Cluster, Level
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from pdcompile.problem.constraints import Pin, Together
from pdcompile.runtime.pipeline import Pipeline
from pdcompile.schedule.registry import KINDS

Step = Callable[[Tensor, Tensor], Any]
OPTIMIZER = partial(torch.optim.SGD, lr=1e-3)
NO_LINKS = Level("none", 1, float("inf"))


@dataclass(frozen=True, slots=True)
class Task:
    """Task of all contestants: a chain, its loss, and the number of microbatches.

    `costs` are pdcompile's option, made from the chain and a minibatch; `cluster` is TOML,
    None where nothing is known of them.
    """

    chain: Callable[[], nn.Sequential]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    microbatches: int
    costs: Callable[[nn.Module, int], Any]
    cluster: str | None = None


@dataclass(slots=True)
class Contestant:
    """One way to train.  `forecast_seconds`: of a step; `bound_seconds`: were messages free."""

    step: Step
    end: Callable[[], Any] = lambda: None
    pipe: Pipeline | None = None
    plan: Plan | None = None
    forecast_seconds: float | None = None
    bound_seconds: float | None = None


def microbatches(task: Task, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    parts = x.tensor_split(task.microbatches), y.tensor_split(task.microbatches)
    return zip(*parts, strict=True)


# -- torch -----------------------------------------------------------------------------------


def alone(task: Task) -> Contestant:
    """Plain PyTorch with gradient accumulation, on rank 0; the others do nothing."""
    if dist.get_rank():
        return Contestant(lambda _x, _y: None)
    model = task.chain()
    optimizer = OPTIMIZER(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for a, b in microbatches(task, x, y):
            (task.loss_fn(model(a), b) / task.microbatches).backward()
        optimizer.step()

    return Contestant(step)


def data_parallel(task: Task, *, sharded: bool) -> Contestant:
    """Every rank takes its share of the microbatches; gradients are summed after the last one."""
    ranks, model = dist.get_world_size(), task.chain()
    if sharded:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        trained: Any = model
    else:
        trained = DistributedDataParallel(model)
    optimizer = OPTIMIZER(trained.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        own = list(microbatches(task, x, y))[dist.get_rank() :: ranks]
        for n, (a, b) in enumerate(own):
            last = n == len(own) - 1
            if sharded:
                trained.set_requires_gradient_sync(last)
            else:
                trained.require_backward_grad_sync = last
            (task.loss_fn(trained(a), b) / len(own)).backward()
        optimizer.step()

    return Contestant(step)


def torch_pipeline(task: Task, schedule: str, cut: Sequence[int]) -> Contestant:
    """torch.distributed.pipelining; `cut[i]` is the first layer of stage i."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chain, device = task.chain(), torch.device("cpu")
    ends = [*cut[1:], len(chain)]
    kind = getattr(pipelining.schedules, schedule)
    mine = [s for s in range(len(cut)) if s % ranks == rank]
    if "ZBV" in schedule:
        mine = [rank, 2 * ranks - 1 - rank]
    parts = [chain[cut[s] : ends[s]] for s in mine]
    stages = [
        pipelining.PipelineStage(part, s, len(cut), device)
        for part, s in zip(parts, mine, strict=True)
    ]
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    runs = kind(stages if several else stages[0], task.microbatches, loss_fn=task.loss_fn)
    optimizer = OPTIMIZER([p for part in parts for p in part.parameters()])
    first, last = 0 in mine, len(cut) - 1 in mine

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        runs.step(*((x,) if first else ()), **({"target": y} if last else {}))
        optimizer.step()

    return Contestant(step)


# -- pdcompile -------------------------------------------------------------------------------


def ours(
    task: Task,
    schedule: str,
    cut: Sequence[int] | None = None,
    *,
    clip: float | None = None,
    **options: Any,
) -> Contestant:
    """One of pdcompile's schedules; without a cut its planner decides, layers staying whole.

    A schedule that updates after every microbatch takes the minibatch in as many calls.
    """
    each = schedule in KINDS and KINDS[schedule].updates_each
    calls = task.microbatches if each else 1
    chain = task.chain()
    if cut is None:
        *others, last = map(str, range(len(chain)))  # each stage has a layer, the last one too
        constraints = (*map(Together, others), Together(last, "loss_fn"))
    else:
        stage_of = [sum(first <= n for first in cut) - 1 for n in range(len(chain))]
        constraints = tuple(Pin(str(n), stage) for n, stage in enumerate(stage_of))
        options.setdefault("stages", len(cut))
    size = len(task.x) // task.microbatches
    if task.cluster is not None:
        options.setdefault("cluster", Cluster.from_toml(task.cluster))
    pipe = pdcompile.compile(
        chain, loss_fn=task.loss_fn, optimizer=OPTIMIZER, schedule=schedule,
        microbatches=1 if each else task.microbatches, constraints=constraints,
        costs=task.costs(chain, size), max_grad_norm=clip, verify="off", refine=False,
        outputs="none", progress=False, **options,
    )  # fmt: skip
    del chain
    pipe.prepare(task.x[: len(task.x) // calls], target=task.y[: len(task.y) // calls])
    plan = pipe.plan
    assert plan.forecast is not None
    free = simulate(plan, links=lambda _a, _b: NO_LINKS, timeline=False).forecast

    def step(x: Tensor, y: Tensor) -> None:
        if calls == 1:
            pipe.step(x, target=y)
            return
        for a, b in microbatches(task, x, y):
            pipe.step(a, target=b)

    return Contestant(
        step, pipe.close, pipe, plan,
        calls * plan.forecast.step_seconds, calls * free.step_seconds,
    )  # fmt: skip


def cut_of(pipe: Pipeline) -> list[int]:
    """The first layer of each stage."""
    session = pipe._session
    assert session is not None
    places = {op.name: op.module_path.split(".")[0] for op in session.compiled.capture.train.ops}
    held = [[places[op] for op in stage.ops] for stage in pipe.plan.stages[1:]]
    return [0, *(min(int(place) for place in stage if place.isdecimal()) for stage in held)]
