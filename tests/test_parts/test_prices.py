"""Seconds of conversions, by the link that joins the parts."""

from __future__ import annotations

import pytest
import torch

from examples.gpt import loss_fn
from pdcompile.cluster import Level, message_seconds, ring_seconds
from pdcompile.ir.graph import Op, OpGraph
from pdcompile.passes.costs import estimate
from pdcompile.passes.costs.costed_op import costed_ops
from pdcompile.passes.costs.rehearsal.kept_storages import kept_storages
from pdcompile.passes.costs.rehearsal.rehearse import Stage
from pdcompile.passes.parts import in_parts
from pdcompile.passes.parts.prices import note_on_exchange, priced
from pdcompile.passes.profile import with_costs
from pdcompile.passes.profile.op_bench import _bench
from pdcompile.plan import Training
from tests.helpers.divided import batch_of, model_of
from tests.helpers.generated import captured

LINK = Level("nvlink", 2, 1e9, 1e-5)


def divided(split: str) -> OpGraph:
    inputs, target = batch_of("gpt")
    _, _, capture = captured(model_of("gpt"), inputs, target, loss_fn)
    graph = in_parts(capture, Training(parts=2, split=split, batch_size=4)).train
    return with_costs(graph, estimate(graph, microbatch_size=2))


def added(graph: OpGraph, target: str) -> list[tuple[int, float, float]]:
    """Bytes of the result, and seconds that the link adds forward and backward, of each call."""
    return [
        (
            graph.values[op.name].bytes(2),
            new.cost.forward_seconds - op.cost.forward_seconds,
            new.cost.backward_seconds - op.cost.backward_seconds,
        )
        for op, new in zip(graph.ops, priced(graph, LINK).ops, strict=True)
        if op.target == f"pdcompile_parts.{target}" and op.cost and new.cost
    ]


def test_sums_gathers_and_swaps_take_what_their_bytes_take() -> None:
    width, sequence = divided("width"), divided("sequence")
    totals, spreads = added(width, "total"), added(width, "spread")
    assert totals
    assert spreads
    for size, forward, backward in totals:
        assert abs(forward - ring_seconds(LINK, size, 2)) < 1e-9
        assert abs(backward) < 1e-12
    for size, forward, backward in spreads:
        assert abs(forward) < 1e-12
        assert abs(backward - ring_seconds(LINK, size, 2)) < 1e-9
    swaps = added(sequence, "swap")
    assert swaps
    for size, forward, backward in swaps:  # each part has a half, and sends half of that
        assert abs(forward - message_seconds(LINK, size / 2)) < 1e-9
        assert abs(backward - forward) < 1e-9


def test_a_note_tells_the_share_of_the_time() -> None:
    graph = divided("width")
    (note,) = note_on_exchange(priced(graph, LINK), LINK)
    assert note.startswith("the 2 parts of a stage exchange values in ")
    assert "link 'nvlink', 1.00 GB/s" in note
    assert priced(graph, None) is graph
    assert not [*note_on_exchange(graph, None)]


@pytest.mark.parametrize("split", ["width", "width+sequence", "sequence", "context", "samples"])
def test_conversions_run_where_memory_is_rehearsed(
    split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that cannot run there is guessed to keep its result."""
    graph = divided(split)

    def imitated(_: Stage, op: Op, env: object) -> None:
        raise AssertionError(op.name)

    monkeypatch.setattr(Stage, "imitated", imitated)
    assert kept_storages(graph, 4).keys() == {op.name for op in graph.ops}


def test_an_op_of_a_part_is_timed_on_its_own_slices() -> None:
    graph, model = divided("width"), model_of("gpt")
    timed = set()
    for call in costed_ops(graph, 2):
        if call.op.kind == "module" and call.op.parameters:
            bench = _bench(call, model, 2, torch.device("cpu"))
            held = [graph.tensors[fqn].shape for fqn in call.op.parameters]
            assert [tuple(one.shape) for one in bench.weights] == held
            bench.prepare()()
            timed.add(held[0])
    assert (96, 64) in timed  # of the 192 rows of qkv
