"""Position: training that goes on from a saved state draws what it would have drawn."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pdcompile.errors import InputError
from pdcompile.position import Position, position_of, with_position
from pdcompile.reference import reference
from tests.helpers.changes import batch
from tests.helpers.launch import processes
from tests.helpers.pipelines import by_hand, states_equal
from tests.helpers.resuming import Resumed


def make(schedule: str, *, eager: bool = False) -> Any:
    model = Resumed(tied=False)
    options: dict[str, Any] = {
        "loss_fn": F.mse_loss, "schedule": schedule, "microbatches": 4,
        "optimizer": partial(torch.optim.AdamW, lr=0.02),
    }  # fmt: skip
    return (
        reference(model, **options) if eager else by_hand(model, 2, *batch(0), **options).prepare()
    )


def train(runner: Any, first: int, last: int) -> list[float]:
    return [float(runner.step(batch(t)[0], target=batch(t)[1]).loss) for t in range(first, last)]


def saved(runner: Any) -> tuple[Any, Any]:
    """State and optimizer state, through torch.save and torch.load with its safe reader."""
    file = io.BytesIO()
    torch.save((runner.full_state_dict(), runner.optimizer.state_dict()), file)
    file.seek(0)
    state, optimizer = torch.load(file, weights_only=True)
    return state, optimizer


@pytest.mark.sample(1)
@pytest.mark.parametrize("eager", [False, True], ids=["pipeline", "reference"])
def test_a_resumed_training_goes_on(eager: bool) -> None:
    whole, first, second = (make("1f1b", eager=eager) for _ in range(3))
    expected = train(whole, 0, 6)
    assert train(first, 0, 3) == expected[:3]
    first.predict(batch(0)[0])
    state, optimizer = saved(first)
    assert position_of(state) == first.position == Position(3, 1)
    assert list(state) == list(Resumed(tied=False).state_dict())
    second.load_state_dict(state)
    second.optimizer.load_state_dict(optimizer)
    assert train(second, 3, 6) == expected[3:]
    assert second.position == Position(6, 1)
    assert not states_equal(second.full_state_dict(), whole.full_state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_pipeline_resumes_as_its_reference_does(schedule: str) -> None:
    ours, theirs = make(schedule), make(schedule, eager=True)
    assert train(ours, 0, 3) == train(theirs, 0, 3)
    states = [saved(one) for one in (ours, theirs)]
    train(ours, 3, 5), train(theirs, 3, 5)
    for one, (state, optimizer) in zip((ours, theirs), states, strict=True):  # and back
        one.load_state_dict(state)
        one.optimizer.load_state_dict(optimizer)
    assert train(ours, 3, 6) == train(theirs, 3, 6)
    assert not states_equal(ours.full_state_dict(), theirs.full_state_dict())


def test_a_state_without_its_position_can_be_told_it() -> None:
    whole, first, second = make("1f1b"), make("1f1b"), make("1f1b")
    expected = train(whole, 0, 6)
    train(first, 0, 3)
    plain = {name: value.clone() for name, value in first.full_state_dict().items()}
    assert position_of(plain) is None
    second.load_state_dict(plain, position=first.position)
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    assert train(second, 3, 6) == expected[3:]
    second.load_state_dict(plain)
    assert second.position == Position(6)  # counting goes on


def test_what_is_no_position_is_refused() -> None:
    state = with_position({}, Position(1))
    state._metadata[""]["pdcompile"]["minibatches"] = -1  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="two counts"):
        position_of(state)


def test_models_load_a_state_with_a_position() -> None:
    pipe = make("1f1b")
    train(pipe, 0, 1)
    model = Resumed(tied=False)
    model.load_state_dict(pipe.full_state_dict())
    assert not states_equal(dict(model.state_dict()), pipe.full_state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_states_in_mid_stream_are_of_one_moment(schedule: str) -> None:
    pipe, eager = make(schedule), make(schedule, eager=True)
    train(pipe, 0, 3), train(eager, 0, 3)
    model = pipe._model
    part = copy.deepcopy(model.third.state_dict())  # of a part of the model, too
    assert not states_equal(part, dict(eager._model.third.state_dict()))
    train(pipe, 3, 4), train(eager, 3, 4)
    assert not states_equal(dict(model.state_dict()), eager.full_state_dict())
    steps = {int(values["step"]) for values in pipe.optimizer.state_dict()["state"].values()}
    assert steps == {4}
    train(pipe, 4, 5)
    again = pickled(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    pipe.close()
    assert not model._state_dict_pre_hooks


def pickled(model: Any) -> Any:
    """A copy of the whole model, as torch.save makes it while a pipeline trains it."""
    file = io.BytesIO()
    hooks = dict(model.third._forward_hooks)
    torch.save(copy.deepcopy(model), file)
    assert dict(model.third._forward_hooks) == hooks
    file.seek(0)
    return torch.load(file, weights_only=False)


SCRIPT = """
import os, torch
from tests.test_position import make, train
rank, states = int(os.environ["RANK"]), []
whole = make("1f1b")
expected = train(whole, 0, 6)
first, second = make("1f1b"), make("1f1b")
train(first, 0, 3)
second.load_state_dict(first.state_dict())  # each rank its part
second.optimizer.load_state_dict(first.optimizer.state_dict())
assert train(second, 3, 6) == expected[3:]
print(f"rank {rank} goes on")
"""


@pytest.mark.slow
def test_two_ranks_go_on(tmp_path: Path) -> None:
    run = processes(SCRIPT, 2, tmp_path)
    assert run.output.count("goes on") == 2, run
