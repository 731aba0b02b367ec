"""Messages of a comparison: what its ranks are told, and what they tell."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pdcompile
from benchmarks.models import CHAINS, Sample
from benchmarks.side_by_side.contestants import Task
from benchmarks.side_by_side.waiting import Times, profile_of, waiting


@dataclass(frozen=True, slots=True)
class Job:
    """Job of the ranks of one comparison.

    `times`: of the layers, where they wait; `cluster`: TOML that says what links there are;
    `interface`: where traffic is counted, None: on this process's connections.
    """

    model: str
    names: tuple[str, ...]
    microbatches: int = 8
    rounds: int = 5
    steps: int = 3
    times: tuple[Times, ...] = ()
    cluster: str | None = None
    interface: str | None = None
    memory: bool = True  # whether the peak of each contestant is measured first
    arguments: dict[str, Any] = field(default_factory=dict)  # of the model

    def sample(self, **changed: Any) -> Sample:
        """The model and a minibatch from seed 0."""
        torch.manual_seed(0)
        return CHAINS[self.model](**{**self.arguments, **changed})

    def task(self, **changed: Any) -> Task:
        """Task that the contestants do; `changed`: other arguments of the model."""
        one = self.sample(**changed)
        assert one.loss_fn is not None

        def chain() -> nn.Sequential:
            made = self.sample(**changed).model
            assert isinstance(made, nn.Sequential)
            return waiting(made, one.inputs, self.times) if self.times else made

        def costs(model: nn.Module, size: int) -> Any:
            if not self.times:
                return "measured"
            return profile_of(pdcompile.trace(model, one.inputs), size, self.times)

        return Task(
            chain, one.loss_fn, one.inputs, one.target, self.microbatches, costs, self.cluster
        )

    @staticmethod
    def read(path: Path) -> Job:
        found = json.loads(path.read_text())
        found["times"] = tuple(Times(**one) for one in found["times"])
        return Job(**{**found, "names": tuple(found["names"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass(slots=True)
class Figures:
    """Figures of one contestant on one rank: seconds a step of each round, bytes sent a step, peak,
    and what Python takes for an instruction."""

    seconds: list[float] = field(default_factory=list)
    sent_bytes: float = 0.0
    peak_bytes: int = 0
    python_seconds: float | None = None
    forecast_seconds: float | None = None
    bound_seconds: float | None = None
    stages: str = ""
    refused: str = ""
