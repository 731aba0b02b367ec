"""Resuming: `compile(resume=)`, `pdcompile run --resume`, and plain PyTorch from a checkpoint."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pdcompile
from pdcompile.cli import main
from pdcompile.cluster import Cluster
from pdcompile.errors import CheckpointError, ConfigError, InputError, NotPrepared
from pdcompile.position import Position
from pdcompile.problem.constraints import CutAt
from tests.helpers.alike import WORKLOAD
from tests.helpers.changes import Rich, batch
from tests.helpers.launch import processes
from tests.helpers.pipelines import by_hand, states_equal
from tests.helpers.resuming import ADAMW, Resumed, pipeline, same, train


def compiled(folder: Path | None, stages: int = 2, **options: Any) -> Any:
    given = {
        "loss_fn": F.mse_loss, "optimizer": ADAMW, "microbatches": 4, "costs": "estimated",
        "cluster": Cluster.local(stages), "verify": "off", "progress": False, "resume": folder,
        **options,
    }  # fmt: skip
    return pdcompile.compile(Resumed(tied=False), **given)


def test_the_position_is_known_before_the_first_minibatch(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no checkpoint in .*: training starts at its"):
        first = compiled(tmp_path, schedule="vsync", microbatches=1)
    assert first.position == Position(0)
    losses = train(first, 0, 3)
    first.save(tmp_path)
    losses += train(first, 3, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = compiled(tmp_path, schedule="vsync", microbatches=1)
        assert second.position == Position(3)
        assert train(second, 3, 6) == losses[3:]
    assert second.plan.stages == first.plan.stages
    assert not states_equal(second.full_state_dict(), first.full_state_dict())


def test_what_was_resumed_is_saved_again_before_a_minibatch(tmp_path: Path) -> None:
    first = compiled(None)
    train(first, 0, 1)
    made = first.save(tmp_path / "one")
    assert compiled(tmp_path / "one").save(tmp_path / "one") == made
    with pytest.raises(NotPrepared, match="no plan yet"):
        compiled(tmp_path / "one").save(tmp_path / "other")


def test_one_rank_says_that_there_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(tmp_path)


def test_a_plan_that_does_not_fit_is_made_anew(tmp_path: Path) -> None:
    first = compiled(None)
    train(first, 0, 2)
    first.save(tmp_path)
    expected = train(first, 2, 4)
    second = compiled(tmp_path, 3, schedule="zb-h1")
    with pytest.warns(UserWarning, match="the plan in the checkpoint is not used: .*schedule"):
        second.prepare(batch(0)[0], target=batch(0)[1])
    assert len(second.plan.stages) == 3
    assert train(second, 2, 4) == expected
    (second.save(tmp_path) / "plan.json").write_text("{}")
    with pytest.warns(UserWarning, match="the plan is damaged"):
        third = compiled(tmp_path).prepare(batch(0)[0], target=batch(0)[1])
    assert third.position == Position(4)


def test_options_of_the_search_are_no_reason_to_plan_anew(tmp_path: Path) -> None:
    """The program that goes on is the one that began, and says how to search."""
    search: dict[str, Any] = {
        "time_limit": 5.0, "cut_tolerance": 0.05, "max_staleness": 1, "schedule": "auto",
        "constraints": (CutAt("*"),),
    }  # fmt: skip
    first = compiled(None, **search)
    train(first, 0, 1)
    first.save(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the plan in the checkpoint is not used")
        second = compiled(tmp_path, **search).prepare(batch(0)[0], target=batch(0)[1])
    assert second.plan.stages == first.plan.stages


def test_a_plan_is_made_anew_under_other_constraints(tmp_path: Path) -> None:
    first = compiled(None)
    train(first, 0, 1)
    first.save(tmp_path)
    with pytest.warns(UserWarning, match="the plan in the checkpoint is not used: constraints"):
        compiled(tmp_path, constraints=(CutAt("*"),)).prepare(batch(0)[0], target=batch(0)[1])


def test_a_scheduler_is_missed_when_training_goes_on_without_it(tmp_path: Path) -> None:
    """It can be made, and handed over, only once the pipeline has resumed."""

    def begun(folder: Path | None) -> tuple[Any, Any]:
        pipe = compiled(folder).prepare(batch(0)[0], target=batch(0)[1])
        return pipe, torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1)

    first, scheduler = begun(None)
    train(first, 0, 2)
    scheduler.step()
    place = first.save(tmp_path, schedulers=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second, again = begun(tmp_path)
        second.load(place, schedulers=again)
        train(second, 2, 4)
        third, _ = begun(tmp_path)
    with pytest.warns(UserWarning, match="state of scheduler 0, which was not handed over") as seen:
        train(third, 2, 4)
    assert len(seen) == 1
    assert again.last_epoch == 1


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume=3 is not a path"):
        compiled(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not resume"):
        pdcompile.reference(Rich(tied=False), resume=tmp_path, microbatches=2)
    (tmp_path / "save-0001-minibatch-1").mkdir()
    with pytest.raises(CheckpointError, match="no readable manifest"):
        compiled(tmp_path)


def test_a_training_begins_only_where_nothing_else_is(tmp_path: Path) -> None:
    file = tmp_path / "last.pt"
    file.write_bytes(b"weights")
    for place, message in ((file, "this is a file"), (tmp_path, "and last.pt there")):
        with pytest.raises(CheckpointError, match=message) as error:
            compiled(place)
        assert str(place) in str(error.value)
        assert "empty or not there" in str(error.value)
        with pytest.raises(CheckpointError, match=r"no folder|no complete checkpoint"):
            pdcompile.load_checkpoint(place, Rich(tied=False))
    runs = tmp_path / "runs"
    first = compiled(None)
    train(first, 0, 1)
    (first.save(runs / "first") / "manifest.json").unlink()
    for place, message in ((runs, "and first there"), (runs / "first", "save-0001-minibatch-1")):
        with pytest.raises(CheckpointError, match=message):
            compiled(place)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / ".writing-0123").mkdir()  # left by a killed process
    for place in (empty, empty / "not" / "there"):
        with pytest.warns(UserWarning, match="no checkpoint in .*: training starts at its"):
            assert compiled(place).position == Position(0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tied", [False, True])
def test_plain_pytorch_goes_on(tied: bool, tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 3, tied=tied)
    train(pipe, 0, 3)
    pipe.save(tmp_path)
    model = Rich(tied, seed=7)
    optimizer = torch.optim.AdamW([{"params": [*model.parameters()][:3]}, {"params": []}], lr=9.0)
    optimizer.add_param_group({"params": [*model.parameters()][3:]})
    assert pdcompile.load_checkpoint(tmp_path, model, optimizer) == Position(3)
    assert not states_equal(dict(model.state_dict()), pipe.full_state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 9.0, 0.02]
    expected = pipe.full_optimizer_state_dict()["state"]
    for name, parameter in model.named_parameters():
        assert same(optimizer.state.get(parameter, {}), expected.get(name, {}))
    wrong = Rich(tied, seed=7)
    with pytest.raises(CheckpointError, match="state of AdamW, and this one is SGD"):
        pdcompile.load_checkpoint(tmp_path, wrong, torch.optim.SGD(wrong.parameters(), lr=1.0))
    assert not states_equal(dict(wrong.state_dict()), dict(Rich(tied, seed=7).state_dict()))
    with pytest.raises(CheckpointError, match=r"the model has 0.weight, .* does not"):
        pdcompile.load_checkpoint(tmp_path, torch.nn.Sequential(torch.nn.Linear(8, 8)))


class Counted(torch.nn.Module):
    """Counts in a buffer that its state dict leaves out."""

    captured_once = True

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(size), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.add_(1.0)
        y: torch.Tensor = self.linear(x) * self.calls.sum()
        return y


def test_plain_pytorch_gets_what_state_dicts_leave_out(tmp_path: Path) -> None:
    pipe = by_hand(Counted(), 1, *batch(0), microbatches=2, loss_fn=F.mse_loss).prepare()
    train(pipe, 0, 2)
    pipe.save(tmp_path)
    model = Counted()
    pdcompile.load_checkpoint(tmp_path, model)
    assert model.calls.tolist() == [4.0] * 4
    with pytest.raises(CheckpointError, match=r"calls is float32 \(4,\) in the checkpoint, .*3"):
        pdcompile.load_checkpoint(tmp_path, Counted(3))
    other = by_hand(Counted(3), 1, *batch(0), microbatches=2, loss_fn=F.mse_loss).prepare()
    with pytest.raises(CheckpointError, match=r"calls is float32 \(4,\)"):
        other.load(tmp_path)


class Tagged(torch.nn.Linear):
    """Keeps more than tensors in its state dict."""

    def __init__(self, **tag: Any) -> None:
        super().__init__(8, 8)
        self.tag = tag

    def get_extra_state(self) -> Any:
        return self.tag

    def set_extra_state(self, state: Any) -> None:
        self.tag = {**state}


def test_extra_states_of_modules_go_on(tmp_path: Path) -> None:
    def tagged(**tag: Any) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), Tagged(**tag))
        return by_hand(model, 2, *batch(0), microbatches=2, loss_fn=F.mse_loss).prepare()

    pipe = tagged(version=3)
    state = pipe.full_state_dict()
    pipe.save(tmp_path)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), Tagged(version=1))
    assert set(state) == set(plain.state_dict())
    for load in (plain.load_state_dict, lambda _: pdcompile.load_checkpoint(tmp_path, plain)):
        plain[1].tag = {}  # type: ignore[assignment]
        load(state)
        assert plain[1].tag == {"version": 3}
    other = tagged()
    other.load_state_dict({**state, "1._extra_state": {"version": 4}})
    assert other.state_dict()["1._extra_state"] == {"version": 4}
    other.load(tmp_path)
    assert other.state_dict()["1._extra_state"] == {"version": 3}
    with pytest.raises(InputError, match="Tagged does not take its extra state: TypeError"):
        other.load_state_dict({"1._extra_state": 3})
    with pytest.warns(UserWarning, match=r"1\._extra_state is in no checkpoint: .*function"):
        tagged(code=len).save(tmp_path / "other")


def test_the_optimizers_state_goes_where_the_model_is(tmp_path: Path) -> None:
    pipe = pipeline("1f1b")
    train(pipe, 0, 1)
    pipe.save(tmp_path)
    model = Rich(tied=False).to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    pdcompile.load_checkpoint(tmp_path, model, optimizer)
    states = [one for one in optimizer.state.values() if one]
    assert states
    assert all(state["exp_avg"].is_meta for state in states)


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    given = ["run", WORKLOAD, "--cluster", "local:2", "--schedule", "2bw", "--every", "1", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*given, "--costs", "estimated", *arguments])
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def test_the_command_line_saves_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = ran(capsys, "--steps", "7")
    assert "checkpoint" not in whole
    first = ran(capsys, "--steps", "4", "--save-every", "2", "--resume")
    assert first["resumed_at"] == 0
    assert first["checkpoint"] == "checkpoints/save-0002-minibatch-4"
    second = ran(capsys, "--steps", "7", "--resume", "--keep", "1")
    assert second["resumed_at"] == 4
    assert first["losses"] | second["losses"] == whole["losses"]
    assert [p.name for p in Path("checkpoints").glob("save-*")] == ["save-0003-minibatch-7"]
    over = ran(capsys, "--steps", "7", "--resume")
    assert over["losses"] == {}
    assert over["checkpoint"] is None
    last = ran(capsys, "--steps", "2", "--save", "elsewhere")
    assert last["checkpoint"] == "elsewhere/save-0001-minibatch-2"


RESUME = """
    import sys, warnings
    from pathlib import Path
    import torch
    from tests.test_resuming import compiled
    from tests.helpers.resuming import train

    folder, last = Path(sys.argv[1]), int(sys.argv[2])
    pipe = compiled(folder, cluster="auto", schedule="2bw")
    first = pipe.position.minibatches
    losses = train(pipe, first, last)
    pipe.save(folder)
    print("from", first, losses, flush=True)
    pipe.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_resume_with_the_saved_plan_or_another(ranks: int, tmp_path: Path) -> None:
    whole = compiled(None, 1, schedule="2bw")
    expected = train(whole, 0, 5)
    folder = tmp_path / "checkpoints"
    run = processes(RESUME, 2, tmp_path, str(folder), "3")
    assert run.code == 0, str(run)
    assert run.output.count(f"from 0 {expected[:3]}") == 2, str(run)
    run = processes(RESUME, ranks, tmp_path, str(folder), "5")
    assert run.code == 0, str(run)
    assert run.output.count(f"from 3 {expected[3:]}") == ranks, str(run)
    assert ("is not used: it has 2 ranks, and 3" in run.output) == (ranks == 3), str(run)


REPLICAS = """
    import sys
    from functools import partial
    from pathlib import Path
    import torch
    from tests.test_resuming import compiled
    from tests.helpers.changes import batch

    folder, schedule, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    micro = 1 if schedule == "stash" else 4
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    pipe = compiled(folder, cluster="auto", schedule=schedule, microbatches=micro, optimizer=sgd,
                    replicas=(2, 1), stages=2)
    for t in range(pipe.position.minibatches, last):
        pipe.step(batch(t)[0], target=batch(t)[1])
    pipe.save(folder, keep=1)
    state = pipe.full_state_dict()
    if state:
        torch.save(state, folder / "whole.pt")
    pipe.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "stash"])
def test_ranks_that_are_replicas_resume(schedule: str, tmp_path: Path) -> None:
    """Replicas have statistics of batch norm of their own, and groups that are not complete."""
    states = []
    for name, stops in (("whole", (8,)), ("parts", (3, 5, 8))):
        for stop in stops:
            run = processes(REPLICAS, 3, tmp_path, str(tmp_path / name), schedule, str(stop))
            assert run.code == 0, str(run)
        states.append(torch.load(tmp_path / name / "whole.pt", weights_only=True))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0.0, atol=2e-5)


@pytest.mark.slow
def test_stash_replicas_keep_what_waits(tmp_path: Path) -> None:
    """A group that is not complete goes on with the gradients of its beginning."""
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    made = partial(compiled, schedule="stash", microbatches=1, replicas=(3, 1), optimizer=sgd)
    whole, first = made(None, 4), made(None, 4)
    expected = [float(whole.step(batch(t)[0], target=batch(t)[1]).loss) for t in range(10)]
    first_losses = [float(first.step(batch(t)[0], target=batch(t)[1]).loss) for t in range(5)]
    assert first_losses == expected[:5]
    first.save(tmp_path)
    second = made(tmp_path, 4)
    assert train(second, 5, 10) == pytest.approx(expected[5:], abs=2e-5)
    theirs = whole.full_state_dict()
    for name, value in second.full_state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0.0, atol=2e-5)
