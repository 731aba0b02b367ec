"""A user's mistake is not a failure: what raised is forgotten, and training goes on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import ClosedError, InputError
from tests.helpers import models
from tests.helpers.launch import processes
from tests.helpers.pipelines import by_hand

FLUSHING = ["gpipe", "1f1b", "zb-h1"]


def pipeline(model: torch.nn.Module, schedule: str, **options: Any) -> Any:
    given = {
        "loss_fn": models.loss_for("gpt"),
        "microbatches": 4,
        "optimizer": lambda ps: torch.optim.AdamW(ps, lr=0.01),
        "max_grad_norm": 1.0,
        **options,
    }
    return by_hand(model, 2, *models.batch_for("gpt", 8), schedule=schedule, **given).prepare()


def bad_batch(row: int) -> tuple[Tensor, Tensor]:
    ids, target = models.batch_for("gpt", 8)
    ids[row, 3] = 1000  # there are not so many words
    return ids, target


def equal(one: Any, other: Any) -> bool:
    ours, theirs = one.full_state_dict(), other.full_state_dict()
    return (
        all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()
    )


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(FLUSHING),
    st.lists(
        st.tuples(st.sampled_from(["step", "eval_step", "predict"]), st.integers(-1, 7)),
        min_size=2,
        max_size=6,
    ),
)
def test_training_is_as_if_it_had_never_been_tried(
    schedule: str, calls: list[tuple[str, int]]
) -> None:
    """Weights, moments and the streams of dropout; losses that were not read yet still arrive."""
    model = models.gpt(layers=1, tied=True, dropout=0.1)
    twin = copy.deepcopy(model)
    with pipeline(model, schedule) as ours, pipeline(twin, schedule) as theirs:
        pending = []
        for call, row in [("step", -1), *calls, ("step", -1)]:
            if row >= 0:
                ids, target = bad_batch(row)
                with pytest.raises(IndexError) as caught:
                    getattr(ours, call)(ids, **({} if call == "predict" else {"target": target}))
                (note,) = caught.value.__notes__
                assert "in rank 0, stage 0, forward" in note
                continue
            ids, target = models.batch_for("gpt", 8)
            kwargs = {} if call == "predict" else {"target": target}
            found, expected = (getattr(pipe, call)(ids, **kwargs) for pipe in (ours, theirs))
            if call == "predict":
                assert torch.equal(found, expected)
            else:
                pending.append((found, expected))
        assert all(float(a.loss) == float(b.loss) for a, b in pending)
        assert equal(ours, theirs)


def test_gradients_are_added_to_as_in_eager() -> None:
    """A gradient that the failed call had added to .grad is there until the user drops it."""
    model = models.gpt(layers=1)
    twin = copy.deepcopy(model)
    with (
        pipeline(model, "1f1b", max_grad_norm=None) as ours,
        pipeline(twin, "1f1b", max_grad_norm=None) as theirs,
    ):
        with pytest.raises(IndexError):
            ours.forward_backward(bad_batch(7)[0], target=bad_batch(7)[1])
        assert any(parameter.grad is not None for parameter in ours.parameters())
        ours.zero_grad()
        for pipe in (ours, theirs):
            ids, target = models.batch_for("gpt", 8)
            pipe.forward_backward(ids, target=target)
            pipe.clip_grad_norm_(1.0)
            pipe.optimizer.step()
        assert equal(ours, theirs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["2bw", "vsync"])
def test_where_minibatches_overlap_only_an_evaluation_is_forgotten(schedule: str) -> None:
    model = models.gpt(layers=1)
    twin = copy.deepcopy(model)
    micro = {"microbatches": 1 if schedule == "vsync" else 4, "max_grad_norm": None}
    with pipeline(model, schedule, **micro) as ours, pipeline(twin, schedule, **micro) as theirs:
        ids, target = models.batch_for("gpt", 8)
        for pipe in (ours, theirs):
            for _ in range(3):
                pipe.step(ids, target=target)
        with pytest.raises(IndexError):
            ours.predict(bad_batch(2)[0])
        theirs.flush()
        for pipe in (ours, theirs):
            pipe.step(ids, target=target)
        assert equal(ours, theirs)
    pipe = pipeline(models.gpt(layers=1), schedule, **micro)
    with pytest.raises(IndexError) as caught:
        pipe.step(*bad_batch(2)[:1], target=target)
    place, left = caught.value.__notes__
    assert "in rank 0, stage 0, forward of minibatch 0, microbatch " in place
    assert "stage_0.py" in place
    assert left == (
        "the pipeline is closed: weights may be in the middle of the update of minibatch 0: go on "
        "from the last checkpoint"
    )
    with pytest.raises(ClosedError, match="ended with an error: rank 0, stage 0") as closed:
        pipe.step(ids, target=target)
    assert "go on from the last checkpoint" in str(closed.value)


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise ArithmeticError("an update that cannot be made")
        super().step(closure)


def test_an_update_that_has_begun_is_not_undone() -> None:
    pipe = pipeline(models.gpt(layers=1), "1f1b", optimizer=lambda ps: Failing(ps, lr=0.1))
    ids, target = models.batch_for("gpt", 8)
    pipe.step(ids, target=target)
    pipe.optimizer.fails = True
    with pytest.raises(ArithmeticError) as caught:
        pipe.step(ids, target=target)
    assert "in the middle of the update of minibatch 1" in caught.value.__notes__[-1]
    with pytest.raises(ClosedError):
        pipe.step(ids, target=target)


def test_replicas_in_one_process_go_on_after_an_evaluation_alone() -> None:
    """Sums of some microbatches' gradients may be under way when another one fails."""
    ids, target = models.batch_for("gpt", 8)
    pipe = pdcompile.compile(
        models.gpt(layers=1), ids, example_target=target, loss_fn=models.loss_for("gpt"),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), stages=2, replicas=2, microbatches=4,
        cluster=Cluster.local(4), costs="estimated", verify="off", progress=False,
    )  # fmt: skip
    pipe.step(ids, target=target)
    with pytest.raises(IndexError):
        pipe.eval_step(bad_batch(3)[0], target=target)
    pipe.step(ids, target=target)
    with pytest.raises(IndexError):
        pipe.step(bad_batch(3)[0], target=target)
    with pytest.raises(ClosedError):
        pipe.step(ids, target=target)


def test_a_loss_that_raises_once() -> None:
    model = models.gpt(layers=1)
    twin = copy.deepcopy(model)
    with pipeline(model, "1f1b") as ours, pipeline(twin, "1f1b") as theirs:
        ids, target = models.batch_for("gpt", 8)
        wrong = target.clone()
        wrong[5, 3] = 1000
        for call in (ours.step, ours.eval_step):
            with pytest.raises(IndexError) as caught:
                call(ids, target=wrong)
            assert "stage 1, forward" in caught.value.__notes__[0]
        for pipe in (ours, theirs):
            pipe.step(ids, target=target)
        assert equal(ours, theirs)


RANKS = """
import os, sys, time
import torch
from pdcompile.cluster import Cluster
from pdcompile.errors import ClosedError, InputError, PdcompileError
from tests.helpers import models
from tests.test_mistakes import bad_batch, pipeline

rank, kind = int(os.environ["RANK"]), sys.argv[1]
ids, target = models.batch_for("gpt", 8)
pipe = pipeline(models.gpt(layers=1), "1f1b")
pipe.step(ids, target=target)
for wrong in (ids.int(), ids[:, :5]):
    try:
        pipe.step(wrong, target=target)
    except InputError as error:
        print(f"rank {rank} refused: {error.message}", flush=True)
print(f"rank {rank} goes on: {float(pipe.step(ids, target=target).loss):.6f}", flush=True)
if kind == "refused":  # long ago: not the cause of what happens now
    if rank == 0:
        open("went on", "w").close()
    else:
        while not os.path.exists("went on"):  # else it may never hear of the loss
            time.sleep(0.01)
        os._exit(3)
    try:
        for _ in range(50):
            pipe.step(ids, target=target)
    except PdcompileError as error:
        print(f"rank {rank} found: {error.message}", flush=True)
else:
    try:
        pipe.predict(bad_batch(6)[0])
    except Exception as error:
        print(f"rank {rank} raised {type(error).__name__}", *getattr(error, "__notes__", ()),
              flush=True)
    try:
        pipe.step(ids, target=target)
    except ClosedError as error:
        print(f"rank {rank} closed: {error.remedy}", flush=True)
    print(f"rank {rank} still has {sum(p.numel() for p in pipe.parameters()) > 0}", flush=True)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["evaluation", "refused"])
def test_ranks_that_refuse_the_same_go_on_together(kind: str, tmp_path: Path) -> None:
    done = processes(RANKS, 2, tmp_path, kind)
    for rank in range(2):
        assert done.output.count(f"rank {rank} refused: ") == 2, done.output
        assert f"rank {rank} goes on: " in done.output, done.output
    if kind == "refused":
        assert "rank 0 found: another rank failed first: rank 1 ended without" in done.output
    else:
        assert "rank 0 raised IndexError" in done.output, done.output
        assert "rank 1 raised RankError" in done.output, done.output
        for rank in range(2):
            left = f"rank {rank} closed: make a new pipeline; no weight has changed since the last"
            assert left in done.output, done.output
            assert f"rank {rank} still has True" in done.output, done.output


REFUSES_ALONE = """
import os, sys
from pdcompile.errors import ContractError, InputError, RankError
from tests.helpers import models
from tests.test_mistakes import pipeline

rank = int(os.environ["RANK"])
ids, target = models.batch_for("gpt", 8)
pipe = pipeline(models.gpt(layers=1), "1f1b")
pipe.prepare(ids, target=target)
for minibatch in range(3):  # each rank has what its stage needs; the second target is broken
    broken = {"dtype": target.float(), "kind": target.numpy()}[sys.argv[1]]
    given = (ids, None) if rank == 0 else (None, broken if minibatch == 1 else target)
    try:
        float(pipe.step(given[0], target=given[1]).loss)
    except InputError as error:
        print(f"rank {rank} refused: {error.message}", flush=True)
    except (ContractError, RankError) as error:
        print(f"rank {rank} ended at {minibatch}: {error.message}", flush=True)
        break
"""


@pytest.mark.parametrize(
    ("broken", "said"), [("dtype", "this input is float32"), ("kind", "a numpy array")]
)
def test_who_alone_refuses_a_minibatch_does_not_take_the_next_one_for_it(
    broken: str, said: str, tmp_path: Path
) -> None:
    done = processes(REFUSES_ALONE, 2, tmp_path, broken)
    assert f"rank 1 refused: {said}" in done.output, done.output
    ended = "rank 1 ended at 2: rank 0 is in call 2, step (minibatch 1); this rank is in call 3"
    assert ended in done.output, done.output
    assert "rank 0 ended at 1: another rank failed first: rank 1" in done.output, done.output


def test_a_refused_minibatch_is_no_minibatch() -> None:
    with pipeline(models.gpt(layers=1), "1f1b") as pipe:
        ids, target = models.batch_for("gpt", 8)
        with pytest.raises(InputError):
            pipe.step(ids.int(), target=target)
        assert pipe.position.minibatches == 0
        with pytest.raises(IndexError):
            pipe.step(bad_batch(0)[0], target=target)
        assert pipe.position.minibatches == 0
        pipe.step(ids, target=target)
        assert pipe.position.minibatches == 1
