"""A plan that the planner has just made passes its own check, whatever was measured."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompile.batch import flatten_call, resolve_batch
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.options import Options
from pdcompile.options.configuration import configure
from pdcompile.pass_runner import PassRunner
from pdcompile.passes.planning import memory_limits
from pdcompile.passes.trace import capture
from pdcompile.plan import Plan
from pdcompile.planner import Planner
from pdcompile.schedule.registry import KINDS
from tests.helpers.clocks import ticking

FIRST, CASES, BLOCK = 390, 1_000, 5  # one of the first six blocks has a case once refused
SAMPLES = 8
LOSS = nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


class Residual(nn.Module):
    """Blocks with a skip connection over them, a mask and a value without gradients."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.last = nn.Linear(64, 16, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.first(ids)
        mask, kept = ids > 2, x.detach()
        for block in self.blocks:
            x = torch.relu(block(x)) * mask[:, None] + first
        return self.last(x + kept)


def layers() -> nn.Module:
    """A chain, over whose every cut one value passes."""
    hidden = (one for _ in range(5) for one in (nn.Linear(32, 32), nn.Tanh()))
    return nn.Sequential(*hidden, nn.Linear(32, 61))


MODELS = {
    "layers": (layers, torch.zeros(SAMPLES, 32)),
    "residual": (partial(Residual, tied=False), torch.arange(SAMPLES)),
    "tied": (partial(Residual, tied=True), torch.arange(SAMPLES)),
}


@cache
def captured(name: str) -> tuple[nn.Module, Capture]:
    make, inputs = MODELS[name]
    model, target = make(), torch.arange(SAMPLES)
    flat = flatten_call(model, (inputs,), {}, target)
    return model, capture(model, flat, resolve_batch(flat), LOSS, microbatch_size=2)


def with_costs(graph: OpGraph, seconds: float, spread: float, seed: int) -> OpGraph:
    """Ops around so many seconds, up to `spread` apart."""
    r, ops = random.Random(seed), []
    for op in graph.ops:
        assert op.cost is not None
        forward = seconds * spread ** r.uniform(-0.5, 0.5)
        backward = forward * r.uniform(0.5, 3) if op.cost.backward_seconds else 0.0
        cost = replace(op.cost, forward_seconds=forward, backward_seconds=backward)
        ops.append(replace(op, cost=cost))
    return replace(graph, ops=tuple(ops))


def case(seed: int) -> Options:
    """Any schedule, replicas, recomputation, memory and links from 0.1 to 100 GB/s; every third
    with streams of replicas over links on which messages take as long as stages."""
    r, streams = random.Random(seed), seed % 3 == 0
    schedule = r.choice(("stash", "stash", "2bw") if streams else (*KINDS, "auto"))
    kind = KINDS.get(schedule)
    replicas: Any = r.choice((1, 1, "1", "equal", "any", (3, 1), (1, 2), (2, 1, 1)))
    if kind is not None and (kind.usual > 1 or not kind.takes_replicas):
        replicas = r.choice((1, "equal")) if kind.takes_replicas else 1
    replicas = r.choice(((3, 1), (3, 1), (1, 2), (2, 1, 1))) if streams else replicas
    dispatched = kind is not None and kind.dispatched  # replicas follow, on one host
    replicas = 1 if dispatched else replicas
    count = sum(replicas) if isinstance(replicas, tuple) else r.choice((2, 3, 4))
    rate, latency = 10 ** r.uniform(8, 11), r.choice((0.0, 1e-5, 1e-3))
    rate, latency = (1e9, 1e-4) if streams else (rate, latency)
    levels = (Level("near", count, rate, latency, r.random() < 0.8),)
    if count == 4 and r.random() < 0.4 and not dispatched:
        levels = (Level("near", 2, 10 * rate, latency), Level("far", 2, rate, latency))
    like = streams or r.random() < 0.7
    memory: Any = None if streams else r.choice((None, None, 120_000, 3e5))
    devices = (Device("cpu", memory, 1.0 if like else r.choice((0.5, 1, 2))) for _ in range(count))
    each = kind is not None and kind.updates_each
    return Options(
        loss_fn=LOSS,
        optimizer=r.choice((torch.optim.AdamW, SGD)),
        cluster=Cluster(tuple(devices), levels, in_process=True),
        schedule=schedule,
        replicas=replicas,
        recompute=r.choice((False, False, True, "auto")),
        microbatches="auto" if each else r.choice((1, 2, 4, 8)),
        max_grad_norm=1.0 if schedule != "stash" and r.random() < 0.3 else None,
        max_staleness=r.choice((0, 1)),
        costs="estimated",
        time_limit=1.0 if streams else 0.3,
    )


def planned(seed: int) -> Plan | None:
    """Plan as the driver makes it, with costs of its own; None where nothing fits."""
    r, options = random.Random(seed), case(seed)
    seconds, spread = 10 ** r.uniform(-6, -4), 10 ** r.uniform(0, 2)
    model, found = captured("layers" if seed % 3 == 0 else r.choice(tuple(MODELS)))
    chosen = configure(options, batch_size=SAMPLES, splits=True, num_ranks=None)
    planner = Planner(model, found, options, chosen, PassRunner().listener)
    sizes = planner._sizes
    planner._sizes = SimpleNamespace(  # type: ignore[assignment]
        at=lambda size: with_costs(sizes.at(size), seconds, spread, seed)
    )
    planner.costs()
    try:
        return planner.plan()
    except InfeasibleError:
        return None


@pytest.mark.sample(1)
@pytest.mark.parametrize("begin", range(FIRST, FIRST + CASES, BLOCK))
def test_what_was_planned_passes_its_check(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner checks its plan: a PlanError here is what a user would get at every start."""
    monkeypatch.setattr(memory_limits, "advised", lambda error, *_: error)  # nobody reads it
    ticking(monkeypatch)
    made = [planned(seed) for seed in range(begin, begin + BLOCK)]
    assert sum(one is not None for one in made) > BLOCK // 2
