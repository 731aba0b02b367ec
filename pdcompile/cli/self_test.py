"""Self-test: every schedule on what is here, held against `pdcompile.reference` to the last bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import PdcompileError
from pdcompile.hardware import devices
from pdcompile.schedule.registry import KINDS

STEPS, BATCH, MICROBATCHES, WIDTH = 4, 16, 4, 32
TOLERANCE = 1e-4  # of a tensor's largest value, on devices whose sums have no fixed order


class Residuals(nn.Module):
    """(b, width) -> (b, width)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the self-test of one schedule.

    `difference`: the largest one of a weight or loss from the reference, relative to the largest
    value of its tensor; None where it did not run, and `said` why.
    """

    schedule: str
    difference: float | None
    step_seconds: float = 0.0
    said: str = ""

    @property
    def passed(self) -> bool:
        return self.difference is not None and self.difference <= TOLERANCE

    @property
    def result(self) -> str:
        if self.difference is None:
            return "DID NOT RUN"
        if not self.passed:
            return "DIFFERS"
        return "equal, every bit" if self.difference == 0 else f"within {self.difference:.0e}"


def self_test(
    rank: int, ranks: int, device: torch.device, said: Callable[[str], None] = lambda _: None
) -> list[Outcome]:
    """Trains a small model under every schedule; all ranks call it, rank 0 has the outcomes.

    In one process all stages run in it.
    """
    found = []
    for name in (name for name, kind in KINDS.items() if kind.trains):
        said(f"schedule {name}")
        try:
            found.append(_trained(name, rank, ranks, device))
        except PdcompileError as error:  # what is refused is refused on every rank
            found.append(Outcome(name, None, said=error.message))
    return found if rank == 0 else []


def _trained(name: str, rank: int, ranks: int, device: torch.device) -> Outcome:
    kind, places = KINDS[name], max(ranks, 2)
    stages = places * kind.usual
    microbatches = 1 if kind.updates_each else MICROBATCHES
    generator = torch.Generator().manual_seed(0)
    batches = [
        tuple(torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
        for _ in range(STEPS)
    ]
    torch.manual_seed(0)
    model = Residuals(max(8, stages)).to(device)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    pipe = pdcompile.compile(
        model, schedule=name, microbatches=microbatches, loss_fn=nn.functional.mse_loss,
        cluster=_cluster(places, ranks, device), costs="estimated", verify="off", progress=False,
    )  # fmt: skip
    losses, ended = list[Any](), list[float]()
    with pipe:
        for inputs, target in batches:
            losses.append(pipe.step(inputs.to(device), target=target.to(device)).loss)
            ended.append(time.perf_counter())
        pipe.flush()
        ours = [float(loss) for loss in losses]
        state = pipe.full_state_dict()
        plan = pipe.plan
    if rank != 0:
        return Outcome(name, 0.0)
    again = Residuals(max(8, stages)).to(device)
    again.load_state_dict(start)
    known = pdcompile.reference(again, plan=plan, loss_fn=nn.functional.mse_loss)
    theirs: list[Any] = [known.step(x.to(device), target=y.to(device)).loss for x, y in batches]
    known.flush()
    off = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours, map(float, theirs), strict=True)]
    expected = known.state_dict()
    for key, value in state.items():
        other = expected[key].to(value.device)
        off.append(float((value - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    seconds = (ended[-1] - ended[0]) / (len(ended) - 1)
    most = float(torch.tensor(off).max())  # which is NaN where one of them is
    return Outcome(name, most, seconds)


def _cluster(places: int, ranks: int, device: torch.device) -> Cluster | str:
    if devices.is_host(device) and ranks > 1:
        return "auto"
    if ranks == 1:
        return Cluster.local(places, kind=device.type)
    cluster = Cluster.auto()
    kinds = tuple(replace(one, kind=device.type) for one in cluster.devices)
    return replace(cluster, devices=kinds)
