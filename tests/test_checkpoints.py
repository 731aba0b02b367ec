"""Checkpoints: what is resumed is the training that never stopped, on any plan."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict, deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdcompile.errors import CheckpointError, ConfigError
from pdcompile.position import Position
from tests.helpers.launch import processes
from tests.helpers.pipelines import states_equal
from tests.helpers.resuming import ADAMW, pipeline, same, train

EXACT = ("gpipe", "1f1b", "zb-h1", "2bw")


def resumed(schedule: str, stages: int, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pipeline(schedule, stages, **options)
        caught.clear()
        pipe.load(folder)
    return pipe, [str(one.message) for one in caught]


def check(first: Any, second: Any, whole: Any, expected: list[float], stopped: int) -> None:
    """`first` was saved at `stopped`, `second` loaded it: both go on as `whole`."""
    total = len(expected)
    assert train(first, stopped, total) == expected[stopped:]  # to save changes nothing
    assert second.position == Position(stopped)
    assert train(second, stopped, total) == expected[stopped:]
    assert not states_equal(second.full_state_dict(), whole.full_state_dict())
    assert same(second.full_optimizer_state_dict(), whole.full_optimizer_state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize(  # a weight with uses on one stage sums them in another order
    ("stages", "tied"), [(1, False), (3, False), (3, True)]
)
def test_any_cut_goes_on_to_the_last_bit(
    schedule: str, stages: int, tied: bool, tmp_path: Path
) -> None:
    whole, first = (pipeline(schedule, 2, tied=tied) for _ in range(2))
    expected = train(whole, 0, 7)
    train(first, 0, 4)
    first.save(tmp_path)
    second, notes = resumed(schedule, stages, tmp_path, tied=tied)
    assert notes == []
    check(first, second, whole, expected, 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["stash", "vsync"])
@pytest.mark.parametrize("stopped", [1, 2, 6])
def test_every_version_that_will_be_named_is_kept(
    schedule: str, stopped: int, tmp_path: Path
) -> None:
    """Before the warm-up is over too, when there are fewer."""
    whole, first = (pipeline(schedule, 3) for _ in range(2))
    expected = train(whole, 0, 9)
    train(first, 0, stopped)
    first.save(tmp_path)
    second, notes = resumed(schedule, 3, tmp_path)
    assert notes == []
    check(first, second, whole, expected, stopped)


@pytest.mark.slow
def test_a_checkpoint_of_a_resumed_run_is_as_good(tmp_path: Path) -> None:
    whole, pipe = pipeline("vsync", 3), pipeline("vsync", 3)
    expected = train(whole, 0, 8)
    found = []
    for t in range(8):  # stopped after every minibatch
        found += train(pipe, t, t + 1)
        pipe.save(tmp_path, keep=1)
        pipe.close()
        pipe, _ = resumed("vsync", 3, tmp_path)
    assert found == expected
    assert not states_equal(pipe.full_state_dict(), whole.full_state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("saved", "schedule", "stages", "said"),
    [
        ("1f1b", "2bw", 2, "does not have all earlier weights"),
        ("2bw", "1f1b", 3, "training goes on without them"),  # as it drains
    ],
)
def test_a_note_says_which_weights_training_goes_on_from(
    saved: str, schedule: str, stages: int, said: str, tmp_path: Path
) -> None:
    first = pipeline(saved)
    train(first, 0, 3)
    first.save(tmp_path)
    second, notes = resumed(schedule, stages, tmp_path)
    assert said in notes[0]
    expected = pipeline(schedule)
    expected.load_state_dict(first.full_state_dict())
    expected.load_optimizer_state_dict(first.full_optimizer_state_dict())
    assert train(second, 3, 6) == train(expected, 3, 6)


def test_other_microbatch_counts_go_on_within_rounding(tmp_path: Path) -> None:
    """A model is taken without what depends on microbatches: dropout and the statistics of batch
    norm."""
    from tests.helpers import models
    from tests.helpers.pipelines import by_hand

    def make(count: int) -> Any:
        torch.manual_seed(0)
        model = models.mlp()
        x, y = models.batch_for(model, 8)
        given = {"loss_fn": models.loss_for(model), "optimizer": ADAMW, "schedule": "2bw"}
        return by_hand(model, 2, x, y, microbatches=count, **given).prepare()

    def steps(pipe: Any, first: int, last: int) -> None:
        for t in range(first, last):
            x, y = models.batch_for(pipe._model, 8, t)
            pipe.step(x, target=y)

    whole, first, second = make(4), make(4), make(2)
    steps(whole, 0, 6)
    steps(first, 0, 3)
    first.save(tmp_path)
    second.load(tmp_path)
    steps(second, 3, 6)
    theirs = whole.full_state_dict()
    for name, value in second.full_state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0.0, atol=2e-5)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    pipe = pipeline("1f1b")
    places = []
    for t in range(4):
        train(pipe, t, t + 1)
        places.append(pipe.save(tmp_path, keep=2))
    assert [place.exists() for place in places] == [False, False, True, True]
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "save-0003-minibatch-3", "save-0004-minibatch-4",
    ]  # fmt: skip
    pipe.load(places[2])
    assert pipe.position == Position(3)
    pipe.save(tmp_path)  # of an earlier minibatch, and still the last one
    assert pipe.load(tmp_path).name == "save-0005-minibatch-3"
    with pytest.raises(ConfigError, match="keep=0"):
        pipe.save(tmp_path, keep=0)


def test_schedulers_and_generators_go_on(tmp_path: Path) -> None:
    def decays(pipe: Any) -> list[Any]:
        return [
            torch.optim.lr_scheduler.MultiStepLR(pipe.optimizer, [1, 3]),
            torch.optim.lr_scheduler.ReduceLROnPlateau(pipe.optimizer),
        ]

    pipe = pipeline("1f1b", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    schedulers = decays(pipe)
    train(pipe, 0, 2)
    for one in schedulers:
        one.step(*[1.0] * isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau))
    pipe.save(tmp_path, schedulers=schedulers)
    expected = torch.rand(3), random.random(), np.random.rand()
    second = pipeline("1f1b", 3, optimizer=partial(torch.optim.SGD, lr=7.0))
    fresh = decays(second)
    second.load(tmp_path, schedulers=fresh)
    found = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    for one, other in zip(schedulers, fresh, strict=True):
        assert one.state_dict() == other.state_dict()
        assert type(one.state_dict().get("milestones")) is type(
            other.state_dict().get("milestones")
        )
    with pytest.raises(CheckpointError, match="no state of scheduler warm"):
        second.load(tmp_path, schedulers={"warm": fresh[0]})
    with pytest.warns(UserWarning, match="scheduler 0, 1, which was not handed"):
        second.load(tmp_path)
    with pytest.raises(ConfigError, match="which has no state"):
        second.save(tmp_path, schedulers=[3])


class Refusing:
    """A scheduler whose state can be neither had nor given."""

    def __init__(self, optimizer: Any = None) -> None:
        self.given: list[Any] = []

    def state_dict(self) -> Any:
        if not self.given:
            raise KeyError("no state")
        return {"count": 0}

    def load_state_dict(self, state: Any) -> None:
        self.given.append(state)
        if state["count"]:
            raise ValueError("no such count")


def test_schedulers_that_refuse_leave_all_as_it_was(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", optimizer=partial(torch.optim.SGD, lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 2, 0.5)
    train(pipe, 0, 1)
    with pytest.raises(CheckpointError, match=r"1 \(Refusing\) gives no state: KeyError"):
        pipe.save(tmp_path, schedulers=[scheduler, Refusing()])
    assert not [*tmp_path.iterdir()]
    full = Refusing()
    full.given.append(None)
    full.state_dict = lambda: {"count": 3}  # type: ignore[method-assign]
    scheduler.step()
    pipe.save(tmp_path, schedulers=[scheduler, full])
    other = pipeline("1f1b", optimizer=partial(torch.optim.SGD, lr=0.1))
    fresh, last = torch.optim.lr_scheduler.StepLR(other.optimizer, 2, 0.5), Refusing()
    last.given.append(None)
    before = other.full_state_dict(), fresh.state_dict()
    with pytest.raises(CheckpointError, match=r"1 \(Refusing\) does not take its state: Val"):
        other.load(tmp_path, schedulers=[fresh, last])
    assert last.given[-1] == {"count": 0}  # as it was before
    another = torch.optim.lr_scheduler.ExponentialLR(other.optimizer, 0.5)
    with pytest.raises(CheckpointError, match=r"0 was a StepLR when .*, and is a ExponentialLR"):
        other.load(tmp_path, schedulers=[another, last])
    assert fresh.state_dict() == before[1]
    assert not states_equal(other.full_state_dict(), before[0])
    assert other.position == Position(0)


def test_random_numbers_of_another_seed_are_told(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", seed=3)
    train(pipe, 0, 1)
    pipe.save(tmp_path)
    assert resumed("1f1b", 2, tmp_path, seed=3)[1] == []
    (note,) = resumed("1f1b", 2, tmp_path)[1]
    assert "saved with seed=3, and this pipeline has seed=0" in note


def test_checkpoints_of_another_training_stay(tmp_path: Path) -> None:
    first = pipeline("1f1b")
    kept = [first.save(tmp_path, keep=2) for _ in range(2)]
    second = pipeline("1f1b")
    train(second, 0, 1)
    with pytest.warns(UserWarning, match="checkpoints of another training, the last one save-0002"):
        own = [second.save(tmp_path, keep=1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        own += [second.save(tmp_path, keep=1) for _ in range(2)]
        assert [place.exists() for place in kept + own] == [True, True, False, False, True]
        third = pipeline("1f1b")
        third.load(tmp_path)  # now all of them are its own
        third.save(tmp_path, keep=2)
    assert sum(place.is_dir() for place in tmp_path.iterdir()) == 2


def test_weights_alone(tmp_path: Path) -> None:
    pipe = pipeline("1f1b")
    train(pipe, 0, 2)
    pipe.save(tmp_path)
    other = pipeline("1f1b", 3, optimizer=partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(CheckpointError, match="state of AdamW, and this one is SGD") as caught:
        other.load(tmp_path)
    (place,) = tmp_path.iterdir()
    assert f"weights='{place}' (--weights, without --resume)" in (caught.value.remedy or "")
    assert other.position == Position(0)
    other.load(tmp_path, optimizer=False)
    assert not states_equal(other.full_state_dict(), pipe.full_state_dict())
    assert other.position == Position(2)
    train(other, 2, 3)


def test_a_save_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    pipe = pipeline("2bw")
    train(pipe, 0, 2)
    place = pipe.save(tmp_path / "good")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        pipe.save(tmp_path / "file")
    assert "another folder" in (caught.value.remedy or "")
    next(iter(pipe.optimizer.state.values()))["code"] = lambda: None
    with pytest.raises(CheckpointError, match=r"of type builtins\.function"):
        pipe.save(tmp_path / "good")
    del next(iter(pipe.optimizer.state.values()))["code"]
    assert [*(tmp_path / "good").iterdir()] == [place]
    assert pipe.load(tmp_path / "good") == place
    train(pipe, 2, 4)


RANKS = """
    import sys, warnings
    import torch
    from tests.helpers import resuming

    mode, schedule, stages, folder, first, last = sys.argv[1:]
    pipe = resuming.pipeline(schedule, int(stages))
    if mode == "load":
        pipe.load(folder)
    losses = resuming.train(pipe, int(first), int(last))
    print(f"rank {pipe.ranks[0]} losses {losses}", flush=True)
    pipe.save(folder, keep=2)
    state, optimizer = pipe.full_state_dict(), pipe.full_optimizer_state_dict()
    if state:
        torch.save((state, optimizer), f"{folder}/whole.pt")
    pipe.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_ranks_save_what_others_load(schedule: str, tmp_path: Path) -> None:
    """Three ranks, then one process of two stages, then two ranks."""
    whole = pipeline(schedule, 2)
    expected = train(whole, 0, 9)
    folder = tmp_path / "checkpoints"
    run = processes(RANKS, 3, tmp_path, "new", schedule, "3", str(folder), "0", "4")
    assert run.code == 0, str(run)
    assert run.output.count(f"losses {expected[:4]}") == 3, str(run)
    alone, notes = resumed(schedule, 2, folder)
    assert notes == []
    assert train(alone, 4, 6) == expected[4:6]
    alone.save(folder)
    run = processes(RANKS, 2, tmp_path, "load", schedule, "2", str(folder), "6", "9")
    assert run.code == 0, str(run)
    assert run.output.count(f"losses {expected[6:]}") == 2, str(run)
    state, optimizer = torch.load(folder / "whole.pt", weights_only=True)
    assert not states_equal(state, whole.full_state_dict())
    assert same(optimizer, whole.full_optimizer_state_dict())


FAILING = """
    import sys
    from pathlib import Path
    from pdcompile.errors import CheckpointError
    from pdcompile.runtime.state import save_checkpoint
    from tests.helpers import resuming

    folder = Path(sys.argv[1])
    pipe = resuming.pipeline("2bw", 2)
    rank, plain = pipe.ranks[0], save_checkpoint.write_stages
    losses = resuming.train(pipe, 0, 2)

    def full(*_):
        raise OSError(28, "No space left on device")

    if rank == 1:
        save_checkpoint.write_stages = full
    try:
        pipe.save(folder)
    except CheckpointError as error:
        print(f"rank {rank}: {error}", flush=True)
    assert not [*folder.iterdir()], "nothing is left"
    save_checkpoint.write_stages = plain
    losses += resuming.train(pipe, 2, 3)
    place = pipe.save(folder)
    if rank == 0:
        path = place / "stage-001-optimizer.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    losses += resuming.train(pipe, 3, 4)
    try:
        pipe.load(folder)
    except CheckpointError as error:
        print(f"rank {rank}: {error}", flush=True)
    losses += resuming.train(pipe, 4, 6)
    print("losses", losses, flush=True)
    pipe.close()
"""


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(tmp_path: Path) -> None:
    run = processes(FAILING, 2, tmp_path, str(tmp_path / "checkpoints"))
    assert run.code == 0, str(run)
    assert run.output.count(f"losses {train(pipeline('2bw', 2), 0, 6)}") == 2, str(run)
    assert "rank 0: rank 1 could not write its part: the checkpoint cannot be" in run.output
    assert "rank 1: the checkpoint cannot be written: No space left" in run.output
    assert "rank 0: rank 1 cannot load its part: " in run.output
    assert run.output.count("is damaged: its checksum does not fit") == 2
    assert run.output.count("stage-001-optimizer.safetensors") == 2


def test_ranks_that_hold_several_stages(tmp_path: Path) -> None:
    """Interleaved to a V to one stage a rank: these schedules compute the same bits."""
    whole = pipeline("interleaved", 4, ranks=(0, 1, 0, 1))
    expected = train(whole, 0, 6)
    pipe: Any = pipeline("interleaved", 4, ranks=(0, 1, 0, 1))
    found = train(pipe, 0, 2)
    for schedule, stages, ranks, last in (("zb-v", 4, (0, 1, 1, 0), 4), ("1f1b", 3, (), 6)):
        first = pipe.position.minibatches
        pipe.save(tmp_path)
        pipe.close()
        pipe, notes = resumed(schedule, stages, tmp_path, ranks=ranks)
        assert notes == []
        found += train(pipe, first, last)
    assert found == expected
    assert not states_equal(pipe.full_state_dict(), whole.full_state_dict())


class Counting(torch.optim.SGD):
    """Counts its own steps in its groups, and slows down with them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["seen"], group["decay"] = 0, torch.tensor(0.9)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] += 1
            rate = 0.1 * float(group["decay"]) ** group["seen"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-rate)


class Remembering(torch.optim.SGD):
    """Keeps what torch's own optimizers do not: a tensor under two names, one of another shape
    under a name of theirs, a list of limited length, and counts by name."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = state["same"] = torch.zeros_like(parameter)
                    state["sum"] = torch.zeros(())
                    state["norms"] = deque(maxlen=2)
                    state["counts"] = defaultdict(int)
                state["mean"].mul_(0.9).add_(gradient)
                state["sum"].add_(gradient.sum())
                state["norms"].append(float(gradient.norm()))
                state["counts"]["steps"] += 1
                largest = max(state["norms"]) + float(state["sum"].abs()) + state["counts"]["steps"]
                parameter.data.add_(state["same"], alpha=-group["lr"] / largest)


def test_optimizers_may_keep_what_torchs_own_do_not(tmp_path: Path) -> None:
    optimizer = partial(Remembering, lr=0.5)
    whole, first = (pipeline("2bw", 3, optimizer=optimizer) for _ in range(2))
    for pipe in (whole, first):
        pipe.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    expected = train(whole, 0, 6)
    train(first, 0, 3)
    first.save(tmp_path)
    for stages in (3, 2):
        second, notes = resumed("2bw", stages, tmp_path, optimizer=optimizer)
        assert notes == []
        assert train(second, 3, 6) == expected[3:]
        assert not states_equal(second.full_state_dict(), whole.full_state_dict())


def test_what_an_optimizer_counts_itself_goes_on(tmp_path: Path) -> None:
    whole, first = (pipeline("2bw", 3, optimizer=Counting) for _ in range(2))
    expected = train(whole, 0, 6)
    train(first, 0, 3)
    first.save(tmp_path)
    second, notes = resumed("2bw", 2, tmp_path, optimizer=Counting)
    assert notes == []
    assert train(second, 3, 6) == expected[3:]
    assert second.optimizer.param_groups[0]["seen"] == 6
    assert not states_equal(second.full_state_dict(), whole.full_state_dict())
