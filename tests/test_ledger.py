"""The ledger of a rank: what its lines count, and when it holds the most."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.planning.optimizer_state import ADAM, OptimizerCosts, optimizer_costs
from pdcompile.passes.simulate import simulate
from pdcompile.passes.simulate.ledger import _StageLedger, held_over_time
from pdcompile.plan import MemoryLedger, Plan, TiedParameter, Training
from pdcompile.problem import Item, PartitionProblem, SharedParameter, StageLimits, Traffic
from pdcompile.problem.space import Setting
from pdcompile.schedule.spec import BUCKET_BYTES
from tests.helpers.problems import measure
from tests.helpers.schedules import chain, make_plan, plans


def ledgers(plan: Plan) -> tuple[MemoryLedger, ...]:
    return simulate(plan).forecast.ledgers


def test_temporaries_of_the_step_count_where_they_are_the_most() -> None:
    """A flush: nothing is in flight when the optimizer steps."""
    sizes = {"parameter_bytes": 100, "trainable_bytes": 100, "saved_bytes": 30}
    plan = make_plan("1f1b", 2, 4, edges=chain(2, 0), workspace_bytes=10, step_bytes=80, **sizes)
    for one in ledgers(plan):
        assert (one.temporaries_bytes, one.workspace_bytes, one.activations_bytes) == (80, 0, 0)
        assert one.total_bytes == 100 + 100 + 200 + 80
    calm = make_plan("1f1b", 2, 4, edges=chain(2, 0), workspace_bytes=10, step_bytes=20, **sizes)
    assert [one.temporaries_bytes for one in ledgers(calm)] == [0, 0]
    assert [one.activations_bytes for one in ledgers(calm)] == [60, 30]
    assert [one.workspace_bytes for one in ledgers(calm)] == [10, 10]


def test_a_stream_steps_with_microbatches_in_flight() -> None:
    plan = make_plan(
        "2bw", 2, 4, edges=chain(2, 0), trainable_bytes=100, parameter_bytes=100, saved_bytes=30,
        step_bytes=80,
    )  # fmt: skip
    first = ledgers(plan)[0]
    assert (first.temporaries_bytes, first.activations_bytes) == (80, 30)


@pytest.mark.parametrize(
    ("first", "gradients", "workspace"),
    [(60, 60, 0), (130, 100, 30), (0, 100, 10)],
    ids=["less than the gradients", "more", "unknown"],
)
def test_what_a_first_backward_needs(first: int, gradients: int, workspace: int) -> None:
    """It makes the gradients one by one; where nobody knows, all and the workspace count."""
    plan = make_plan(
        "gpipe", 2, 4, edges=chain(2, 0), parameter_bytes=100, trainable_bytes=100, saved_bytes=80,
        workspace_bytes=10, first_workspace_bytes=first,
    )  # fmt: skip
    for one in ledgers(plan):
        assert (one.gradients_bytes, one.workspace_bytes) == (gradients, workspace)
        assert one.total_bytes == 100 + 200 + 4 * 80 + (first or 100 + 10)


@pytest.mark.parametrize(
    ("size", "largest", "bucket"),
    [(60, 20, 60), (3 * BUCKET_BYTES, 20, BUCKET_BYTES),
     (3 * BUCKET_BYTES, 2 * BUCKET_BYTES, 2 * BUCKET_BYTES)],
)  # fmt: skip
def test_replicas_sum_gradients_in_a_bucket(size: int, largest: int, bucket: int) -> None:
    """It has memory beside the gradients, of which it holds a part at one time, or a large one."""
    plan = make_plan(
        "1f1b", 2, 4, edges=chain(2, 0), replicas=(2, 1), parameter_bytes=size,
        trainable_bytes=size, largest_gradient_bytes=largest, workspace_bytes=10,
    )  # fmt: skip
    *replicated, alone = ledgers(plan)
    assert [one.workspace_bytes for one in replicated] == [bucket] * 2
    assert alone.workspace_bytes == 10
    assert all(one.total_bytes == 4 * size + bucket for one in replicated)


def test_a_copy_of_a_tied_parameter_has_one_gradient_until_it_is_out() -> None:
    """It accumulates over the minibatch, and is sent and received once."""
    tied = (TiedParameter("w", (0, 1), 60),)
    plan = make_plan(
        "1f1b", 2, 4, edges=chain(2, 0), tied=tied, parameter_bytes=100, trainable_bytes=100,
        workspace_bytes=70,
    )  # fmt: skip
    owner, copy = ledgers(plan)
    assert (owner.gradients_bytes, copy.gradients_bytes) == (100, 100)
    assert (owner.optimizer_bytes, copy.optimizer_bytes) == (200, 80)
    assert (owner.receive_bytes, owner.send_bytes) == (60, 0)
    assert (copy.receive_bytes, copy.send_bytes) == (0, 0)  # at its peak, in a backward


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_a_replica_without_microbatches_has_sums_but_no_gradients_of_copies(name: str) -> None:
    """It takes part in the sums over replicas, and tells the owner that it has nothing."""
    plan = make_plan(
        name, 2, 1, edges=chain(2, 0), tied=(TiedParameter("w", (0, 1), 10),), replicas=(1, 2),
        parameter_bytes=100, trainable_bytes=100,
    )  # fmt: skip
    found = simulate(plan)
    *_, idle = found.forecast.ledgers
    assert (idle.gradients_bytes, idle.workspace_bytes) == (90, 90)
    *_, curve = held_over_time(plan, found.programs, found.passed_seconds)
    assert {one.ledger.gradients_bytes for one in curve} == {0, 90}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "2bw"])
def test_no_replica_holds_more_than_its_ledger_says(name: str) -> None:
    """Those of a flush go on alike; in a stream they come to their updates at unlike microbatches,
    so that of two the second may hold more."""
    sizes = {"parameter_bytes": 100, "trainable_bytes": 100, "step_bytes": 50, "saved_bytes": 30}
    tied = (TiedParameter("w", (0, 1), 60),)
    plan = make_plan(name, 2, 4, edges=chain(2, 10), tied=tied, replicas=(2, 2), **sizes)
    found = simulate(plan)
    curves = held_over_time(plan, found.programs, found.passed_seconds)
    most = [max(one.ledger.total_bytes for one in curve) for curve in curves]
    said = [one.total_bytes for one in found.forecast.ledgers]
    assert all(held <= own for held, own in zip(most, said, strict=True))
    assert (said[2:] == [680, 720]) == (name == "2bw")


def test_new_weights_of_a_tied_parameter_have_memory_until_they_are_used() -> None:
    tied = (TiedParameter("w", (0, 1), 60),)
    plan = make_plan(
        "1f1b", 2, 4, edges=chain(2, 0), tied=tied, parameter_bytes=60, trainable_bytes=60
    )
    assert ledgers(plan)[1].receive_bytes == 60


def test_values_in_flight_are_activations_and_not_sends() -> None:
    plan = make_plan("1f1b", 2, 4, edges=chain(2, 10), saved_bytes=30)
    first, second = ledgers(plan)
    assert (first.activations_bytes, first.send_bytes) == (60, 0)
    assert (second.activations_bytes, second.send_bytes) == (30, 20)  # gradients that are made anew


def test_results_that_are_out_are_held_by_autograd_alone() -> None:
    """Those that autograd has no use for are not held in flight; a backward frees the others on its
    way."""
    sizes = {"saved_bytes": 30, "loose_bytes": 4, "workspace_bytes": 9, "freed_bytes": 6}
    plan = make_plan("gpipe", 2, 4, edges=chain(2, 10), **sizes)
    sent = replace(plan, edges=(replace(plan.edges[0], bytes=10),))
    first, second = ledgers(sent)
    # Of 4 microbatches the first 2 are out at the first backward, which is that of one of them.
    assert (first.activations_bytes, first.workspace_bytes) == (4 * 30 - 4, 9 - 6)
    assert (second.activations_bytes, second.workspace_bytes) == (4 * 30, 9)
    twice = {"recompute": True, "forward_workspace_bytes": 5}
    again = replace(sent, stages=tuple(replace(one, **twice) for one in sent.stages))
    assert [one.workspace_bytes for one in ledgers(again)] == [5, 5]


def test_a_forward_beside_a_split_backward_may_need_the_most() -> None:
    """The next forward of zero bubble comes between the two parts of a backward."""
    sizes = {"saved_bytes": 30, "split_bytes": 35, "forward_workspace_bytes": 20}
    found = ledgers(make_plan("zb-h1", 2, 4, edges=chain(2, 0), **sizes))
    assert [one.workspace_bytes for one in found] == [20, 20]


def test_a_whole_backward_beside_split_ones_has_its_own_workspace() -> None:
    """The first part counts as a whole backward where its own workspace is not known."""
    text = "mixed: 0F0 0F1 0I0 0W0 0B1 | 1F0 1B0 1F1 1B1"
    for first, expected in ((70, [70, 50]), (31, [31, 50]), (0, [50, 50])):
        plan = make_plan(
            text, 2, 2, edges=chain(2, 0), saved_bytes=30, workspace_bytes=50, split_bytes=35,
            split_workspace_bytes=1, split_first_workspace_bytes=first,
        )  # fmt: skip
        assert [one.workspace_bytes for one in ledgers(plan)] == expected


def test_what_is_still_being_sent_outlives_the_first_part_of_a_backward() -> None:
    """Only what the send alone holds counts: what the second part needs is counted with that."""
    for freed, expected in ((0, 0), (10, 10), (4, 4)):
        plan = make_plan(
            "zb-h1", 2, 4, edges=chain(2, 10), saved_bytes=30, split_bytes=20,
            split_freed_bytes=freed, split_workspace_bytes=100, workspace_bytes=1,
        )  # fmt: skip
        first = ledgers(plan)[0]
        assert (first.workspace_bytes, first.send_bytes) == (100, expected)


def test_a_value_for_another_stage_of_the_rank_is_held_once() -> None:
    """It is an activation of the stage that made it; of one that recomputes the reader keeps it."""
    edges = tuple(
        replace(one, gradient=False, bytes=10 if one.source == 1 else 0) for one in chain(4)
    )
    # At the peak, three sets are between the parts of their backwards: one value is left of two.
    for recompute, saved, values in ((False, 30, 0), (True, 30, 1), (True, 0, 2)):
        plan = make_plan(
            "zb-v", 4, 4, edges=edges, per_rank=2, saved_bytes=saved, recompute=recompute
        )
        assert plan.stages[1].ranks == plan.stages[2].ranks == (1,)
        one = ledgers(plan)[1]
        assert (one.receive_bytes, one.send_bytes) == (10 * values, 0)


@settings(max_examples=60)
@given(plans(max_stages=6, max_microbatches=6, several=True), st.integers(0, 63))
def test_all_stages_of_a_rank_count_whoever_changed_them(plan: Plan, recomputing: int) -> None:
    """One stage of a rank changes what another holds where it hands over, or frees, a value."""
    stages = tuple(
        replace(one, saved_bytes=7 + s, loose_bytes=3, recompute=bool(recomputing >> s & 1))
        for s, one in enumerate(plan.stages)
    )
    edges = tuple(replace(edge, bytes=100 + e) for e, edge in enumerate(plan.edges))
    plan, noted = replace(plan, stages=stages, edges=edges), 0
    with pytest.MonkeyPatch.context() as patch:
        note = _StageLedger._note

        def checked(self: _StageLedger, **during: int) -> None:
            nonlocal noted
            note(self, **during)
            others = [one._parts() for one in self.held.values() if one is not self]
            every = zip(self._parts(**during), *others, strict=True)
            assert self.notes[-1] == tuple(map(sum, every))
            noted += len(others)

        patch.setattr(_StageLedger, "_note", checked)
        simulate(plan)
    assert (noted > 0) == (len({*plan.ranks}) < len(plan.stages))


def test_a_stage_that_recomputes_holds_activations_only_while_it_runs() -> None:
    """Inputs are held between forward and backward, and what is still being sent."""
    plan = make_plan(
        "2bw", 2, 4, edges=chain(2, 10), trainable_bytes=100, parameter_bytes=100, saved_bytes=30,
        step_bytes=80, workspace_bytes=60,
    )  # fmt: skip
    again = replace(plan, stages=tuple(replace(one, recompute=True) for one in plan.stages))
    kept, first = ledgers(plan)[0], ledgers(again)[0]
    assert (kept.activations_bytes, kept.workspace_bytes, kept.send_bytes) == (60, 60, 0)
    assert (first.activations_bytes, first.workspace_bytes, first.send_bytes) == (30, 60, 20)
    large = replace(again, stages=tuple(replace(one, step_bytes=150) for one in again.stages))
    stepping = ledgers(large)[0]
    assert (stepping.activations_bytes, stepping.temporaries_bytes) == (0, 150)


def test_a_stream_copies_the_inputs_of_minibatches_that_overlap() -> None:
    for name, count in (("1f1b", 0), ("2bw", 2)):
        plan = make_plan(name, 3, 6, edges=chain(3, 0), saved_bytes=5, input_bytes=7)
        assert [one.inputs_bytes for one in ledgers(plan)] == [count * 7] * 3


def test_kept_outputs_are_those_of_two_minibatches() -> None:
    plan = make_plan("1f1b", 2, 4, edges=chain(2, 0), saved_bytes=9, output_bytes=3)
    stages = (replace(plan.stages[0], output_bytes=0), plan.stages[1])
    first, second = ledgers(replace(plan, stages=stages))
    assert first.outputs_bytes == 0
    # the last backward: one microbatch has its outputs among its activations
    assert (second.activations_bytes, second.outputs_bytes) == (9, (4 + 3) * 3)


def test_temporaries_depend_on_the_order_of_the_parameters() -> None:
    one_by_one = Training(step=(2.0, 1.0, 0.0))
    assert one_by_one.step_bytes([100, 10, 40, 40]) == 200
    assert one_by_one.step_bytes([10, 100, 90]) == 280
    assert Training(step=(0.0, 0.0, 1.0)).step_bytes([100, 10, 40]) == 150
    assert Training().step_bytes([100]) == 0


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (partial(torch.optim.AdamW, foreach=False), ADAM),
        (partial(torch.optim.AdamW, foreach=True), OptimizerCosts(2.0, (0.0, 0.0, 1.0), 21.0, 2)),
        (partial(torch.optim.AdamW, fused=True), OptimizerCosts(2.0, moved=8.0, calls=0)),
        (partial(torch.optim.SGD, lr=0.1), OptimizerCosts(moved=3.0, calls=1)),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), OptimizerCosts(1.0, moved=8.0, calls=3)),
        (
            partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
            OptimizerCosts(0.0, (1.0, 0.0, 0.0), 6.0, 2),
        ),
        (None, OptimizerCosts()),
    ],
)
def test_an_optimizer_is_asked_what_it_takes(build: Any, expected: OptimizerCosts) -> None:
    assert optimizer_costs(build) == (expected, None)


@pytest.mark.parametrize(
    ("build", "at_once"),
    [
        (torch.optim.AdamW, True),
        (partial(torch.optim.AdamW, foreach=True), True),
        (partial(torch.optim.AdamW, foreach=False), False),
        (partial(torch.optim.AdamW, fused=True), False),
    ],
)
def test_on_a_gpu_optimizers_take_all_parameters_at_once(build: Any, at_once: bool) -> None:
    (found, _), (on_cpu, _) = optimizer_costs(build, on_gpu=True), optimizer_costs(build)
    assert (found.step == (0.0, 0.0, 1.0)) is at_once
    assert found.factor == on_cpu.factor
    assert at_once or found == on_cpu


def test_of_several_optimizers_the_one_that_takes_most_counts() -> None:
    """Matrices alone would show what Muon keeps, and embeddings have AdamW's moments."""

    def several(parameters: Any) -> list[torch.optim.Optimizer]:
        matrices = [p for _, p in parameters.named if p.ndim > 1]
        vectors = [p for _, p in parameters.named if p.ndim <= 1]
        kinds = ((torch.optim.Muon, matrices), (torch.optim.AdamW, vectors))
        return [kind(own) for kind, own in kinds if own]

    (one, _), (found, note) = optimizer_costs(torch.optim.Muon), optimizer_costs(several)
    assert (one.factor, found.factor, note) == (1.0, 2.0, None)
    assert found.step >= one.step
    assert found.moved >= one.moved


def test_an_optimizer_that_cannot_be_asked_is_taken_for_adam() -> None:
    def by_name(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([dict(named.named)["head.weight"]], lr=0.1)

    found, note = optimizer_costs(by_name)
    assert found == ADAM
    assert note is not None
    assert "could not be probed" in note


@st.composite
def shared_problems(draw: st.DrawFn) -> tuple[PartitionProblem, Plan]:
    """A chain of items of which two share a parameter, one a stage, and the plan of that cut."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "2bw"]))
    n, m = draw(st.integers(2, 4)), draw(st.integers(4, 8))
    clip = draw(st.sampled_from([None, 1.0]))
    own, saved, size = (draw(st.integers(0, 50)) for _ in range(3))
    held = tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=n))))
    tied = TiedParameter("w", held, draw(st.integers(1, 90)))
    plan = make_plan(name, n, m, edges=chain(n, size), tied=(tied,), clip=clip)
    plan = replace(
        plan,
        stages=tuple(
            replace(
                stage, saved_bytes=saved, workspace_bytes=3,
                parameter_bytes=own + (tied.bytes if stage.index in held else 0),
                trainable_bytes=own + (tied.bytes if stage.index in held else 0),
            )
            for stage in plan.stages
        ),
    )  # fmt: skip
    item = Item("", (), 1.0, 2.0, own, own, saved, 3)
    problem = PartitionProblem(
        items=(item,) * n,
        traffic=tuple(Traffic(f"x{s}", s, (s + 1,), size, size) for s in range(n - 1)),
        stages=(StageLimits(),) * n,
        shared=(SharedParameter("w", tied.bytes, True, held),),
    )
    setting = Setting(name, m, clipping=clip is not None)
    return scheduled(problem, Cluster.local(n), setting, plan.training.warmup), plan


@settings(max_examples=150)
@given(shared_problems())
def test_the_planners_formula_is_at_most_the_ledger(case: tuple[PartitionProblem, Plan]) -> None:
    problem, plan = case
    least = measure(problem, range(len(problem.stages))).memory_bytes
    for s, (formula, ledger) in enumerate(zip(least, ledgers(plan), strict=True)):
        assert formula <= ledger.total_bytes, s
