"""Outputs that nobody names: plans for several ranks keep them where they take little."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile import Cluster, CutBefore, driver
from pdcompile.batch import example_call
from pdcompile.batch.omitted_output import DROPPED
from pdcompile.cluster import Device
from pdcompile.errors import InfeasibleError
from pdcompile.ir.graph import OpGraph
from pdcompile.options import Options
from pdcompile.passes.stages.kept_outputs import (
    LITTLE,
    LITTLE_BYTES,
    kept_by_default,
    outputs_bytes,
)
from pdcompile.plan import MemoryLedger, Plan
from pdcompile.units import format_bytes
from tests.helpers.alike import COMMON
from tests.helpers.launch import processes


class Large(nn.Module):
    """Model whose outputs are most of what its last rank holds, or very little."""

    captured_once = True

    def __init__(self, width: int, aside: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256))
        self.scale = nn.Parameter(torch.ones(width))
        self.aside = aside

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.layers(x)
        loss = nn.functional.mse_loss(hidden.sum(1), labels)
        made = hidden[:, :1] * self.scale
        return {"loss": loss + made.mean(), "made": made.exp() if self.aside else made}


def planned_for_ranks(model: nn.Module, **options: Any) -> Plan:
    """Plan as ``pdcompile plan --cluster 1x2`` makes it."""
    example = example_call(model, large_batch())
    given: dict[str, Any] = {
        "cluster": "1x2", "costs": "estimated", "microbatches": 4, "progress": False,
        "optimizer": partial(torch.optim.SGD, lr=0.1), "verify": "off",
        "constraints": [] if options.keys() & {"plan", "stages"} else [CutBefore("layers.1")],
    }  # fmt: skip
    return driver.build(model, example, Options.given(given | options)).plan


def driver_graph() -> OpGraph:
    """Graph, as the driver has it, of a model with 16 numbers a sample, and no loss."""
    return pdcompile.trace(nn.Linear(4, 16), torch.ones(8, 4))


def ledger_of(plan: Plan) -> MemoryLedger:
    """Ledger of the last rank."""
    assert plan.forecast is not None
    return plan.forecast.ledgers[-1]


def large_batch() -> dict[str, Tensor]:
    return {"x": torch.ones(8, 4), "labels": torch.ones(8)}


def of_dropped(plan: Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith(DROPPED)]


@pytest.mark.parametrize("aside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_outputs_that_take_little_are_kept_by_default_and_others_dropped(aside: bool) -> None:
    """Plans are for several ranks; the ledger is that of what is kept."""
    plan, named = (
        planned_for_ranks(Large(4096, aside), memory="5 MB", **more)
        for more in ({}, {"outputs": "last"})
    )
    (note,) = of_dropped(plan)
    taken = ledger_of(named).outputs_bytes
    assert taken > LITTLE * 5e6
    assert format_bytes(2 * 8 * 4096 * 4) in note
    assert "outputs='last' (--outputs last)" in note
    assert ledger_of(plan).outputs_bytes == 0
    assert ledger_of(plan).total_bytes <= ledger_of(named).total_bytes - taken
    assert not plan.training.keeps_outputs
    for width, more in ((8, {"memory": "5 MB"}), (4096, {})):
        plan = planned_for_ranks(Large(width, aside), **more)
        named = planned_for_ranks(Large(width, aside), outputs="last", **more)
        assert not of_dropped(plan)
        assert plan.training.keeps_outputs
        assert (plan.stages, plan.forecast) == (named.stages, named.forecast)


def test_more_than_a_number_of_bytes_is_dropped_whatever_a_device_has() -> None:
    graph, devices = driver_graph(), (Device(), Device(memory_bytes=10**12))
    size = outputs_bytes(graph, 8)
    assert size == 2 * 8 * 16 * 4
    assert kept_by_default(graph, 8 * LITTLE_BYTES // size, devices)
    assert not kept_by_default(graph, 8 * (LITTLE_BYTES // size + 1), devices)


def test_outputs_are_not_sent_between_replicas_by_default() -> None:
    plan = planned_for_ranks(Large(8), replicas=2, stages=1)
    assert not plan.training.keeps_outputs
    assert "sent between replicas" in of_dropped(plan)[0]


def test_a_plan_fits_without_outputs_that_nobody_names() -> None:
    most = ledger_of(planned_for_ranks(Large(4096), outputs="none")).total_bytes + 100_000
    plan = planned_for_ranks(Large(4096), memory=most)
    assert of_dropped(plan)
    assert ledger_of(plan).total_bytes <= most
    with pytest.raises(InfeasibleError):
        planned_for_ranks(Large(4096), memory=most, outputs="last")


def test_one_process_keeps_what_a_plan_for_ranks_drops() -> None:
    assert planned_for_ranks(Large(4096), cluster=Cluster.local(2)).training.keeps_outputs
    plan = Plan.from_json(planned_for_ranks(Large(4096), memory="5 MB").to_json())
    assert of_dropped(plan)
    for outputs in (None, "none"):
        with pdcompile.compile(
            Large(4096), large_batch(), plan=plan, progress=False, verify="off", outputs=outputs,
            optimizer=partial(torch.optim.SGD, lr=0.1),
        ) as pipe:  # fmt: skip
            assert not of_dropped(pipe.plan)
            result = pipe.step(**large_batch()).outputs
            assert result is None if outputs else result["made"].shape == (8, 4096)
    again = planned_for_ranks(Large(4096), plan=plan, cluster="auto", microbatches="auto")
    assert of_dropped(again) == of_dropped(plan)


RANKS = (
    COMMON
    + """
import pdcompile
import warnings
from tests.test_kept_outputs import Layers, examples, of_logits
from tests.test_outputs_by_default import Large, large_batch
for given in ({"stages": 2}, {"stages": 1, "replicas": 2}):
    for outputs in ("last", "everything"):
        torch.manual_seed(0)
        common = dict(loss_fn=of_logits, optimizer=partial(torch.optim.SGD, lr=0.1), microbatches=2)
        eager = reference(Layers(4, 15), **common)
        torch.manual_seed(0)
        x, y = examples()
        pipe = pdcompile.compile(Layers(4, 15), x, example_target=y, costs="estimated",
                                 outputs=outputs, **given, **common)
        for kind in ("step", "forward_backward"):
            ours, theirs = (getattr(one, kind)(x, target=y) for one in (pipe, eager))
            assert abs(float(ours.loss) - float(theirs.loss)) < 2e-5
        first = pipe.plan.stages[-1].ranks[0]
        if rank == first:
            torch.testing.assert_close(ours.outputs.logits, theirs.outputs.logits)
            kinds = [type(ours.outputs.hidden[f"layer_{i}"][0]).__name__ for i in range(4)]
            omits = outputs == "last" and len(pipe.plan.stages) > 1
            assert ("OmittedOutput" in kinds) == omits, kinds
            assert "Tensor" in kinds
        else:
            assert ours.outputs is None
        pipe.close()
made = None
for more, kept in ({}, False), ({"outputs": "last"}, True), ({"width": 8}, True), ({}, False):
    more = {"width": 4096, "outputs": None, **more, "plan": made}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipe = pdcompile.compile(
            Large(more.pop("width")), large_batch(), costs="estimated", microbatches=4, **more,
            memory="5 MB",
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )
    notes = [one for one in (str(w.message) for w in told) if "keep no outputs" in one]
    assert len(notes) == (rank == 0 and not kept), notes
    result = pipe.step(**large_batch())
    float(result.loss)
    assert pipe.plan.training.keeps_outputs == kept
    if rank == 0:
        assert result.outputs is None
    elif kept:
        assert result.outputs["made"].shape[0] == 8
    else:
        for _ in range(2):
            try:
                result.outputs
                say("has outputs")
            except ConfigError as error:
                assert type(error).__name__ == "OmittedOutputError", error
                assert "which would take" in str(error)
                assert 'outputs="last"' in str(error)
    assert (pipe.predict(**large_batch()) is None) == (rank == 0)
    made = pipe.plan if more["outputs"] is None and made is None and not kept else None
    pipe.close()
say("equal")
"""
)


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    run = processes(RANKS, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run
    assert "has outputs" not in run.output, run
