"""Schedules that update after every microbatch, against their recurrences, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, PdcompileError
from pdcompile.plan import Plan
from pdcompile.problem.constraints import Together
from tests.helpers import models
from tests.helpers.cases import case
from tests.helpers.launch import processes, torchrun
from tests.helpers.pipelines import by_hand, states_equal
from tests.helpers.planned import with_warmup

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SIZES = (4, 4, 3, 4, 4, 2, 4, 4, 4)


def options_of(model: nn.Module, schedule: str, **given: Any) -> dict[str, Any]:
    return {
        "loss_fn": models.loss_for(model), "optimizer": ADAMW, "schedule": schedule,
        "microbatches": 1, "costs": "estimated", "verify": "off", "progress": False,
        "time_limit": 0, **given,
    }  # fmt: skip


def prepared(model: nn.Module, depths: Sequence[int], **options: Any) -> Any:
    """A pipeline of the model, with a warm-up of one's own where depths are given."""
    x, y = models.batch_for(model, SIZES[0])
    if depths:
        plan = prepared(copy.deepcopy(model), (), **options).plan
        options |= {"plan": with_warmup(plan, depths), "time_limit": None}
    return pdcompile.compile(model, **options).prepare(x, target=y)


def train(pipe: Any, model: nn.Module, events: Callable[[int, Any], None]) -> list[Any]:
    """A loss for each minibatch, while the learning rate changes; `events(t, pipe)` after it."""
    found: list[Any] = []
    decay = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
    for t, size in enumerate(SIZES):
        x, y = models.batch_for(model, size, t)
        found.append(pipe.step(x, target=y).loss)
        decay.step()
        events(t, pipe)
    pipe.flush()
    return [float(loss) for loss in found]


def nothing(_: int, __: Any) -> None:
    """Do nothing between the steps."""


def compare(
    model: nn.Module,
    schedule: str,
    stages: int,
    depths: Sequence[int] = (),
    events: Callable[[int, Any], None] = nothing,
    **given: Any,
) -> Plan:
    twin, options = copy.deepcopy(model), options_of(model, schedule, **given)
    with prepared(model, depths, stages=stages, **options) as pipe:
        ours, plan, state = train(pipe, model, events), pipe.plan, pipe.full_state_dict()
    expected = pdcompile.reference(twin, plan=plan, **options)
    assert ours == train(expected, twin, events)
    equal_states(state, expected.full_state_dict())
    return plan


def equal_states(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


UNTIED: dict[str, Callable[[], nn.Module]] = {
    "mlp": models.mlp,
    "convnet": models.convnet,
    "unet": models.unet,
    "gpt": partial(models.gpt, tied=False, dropout=0.1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["stash", "vsync"])
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        case(name == "mlp" or stages == 3, name, stages)
        for name in UNTIED
        for stages in (1, 2, 3, 4)
    ],
)
def test_trains_as_its_recurrence(name: str, schedule: str, stages: int) -> None:
    torch.manual_seed(0)
    plan = compare(UNTIED[name](), schedule, stages)
    assert plan.training.num_microbatches == 1
    assert plan.training.warmup == tuple(reversed(range(stages)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("depths", [(4, 2, 0), (2, 2, 0), (5, 1, 1)])
@pytest.mark.parametrize("schedule", ["stash", "vsync"])
def test_a_deeper_warm_up_is_older_weights(schedule: str, depths: tuple[int, ...]) -> None:
    compare(models.mlp(), schedule, 3, depths)


def test_stash_with_a_tied_parameter_on_one_stage() -> None:
    model = models.mlp()
    model.layers[3].weight = model.layers[2].weight
    together = Together("layers.2", "layers.3")
    plan = compare(model, "stash", 2, constraints=(together,))
    assert "layers.2.weight" in plan.stages[0].parameters


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stages", "depths"), [(2, ()), (3, (4, 2, 0)), (4, ())])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_vsync_with_tied_weights_and_clipping(
    stages: int, depths: tuple[int, ...], clip: float | None
) -> None:
    """Updates wait for other stages, and are as late as legal."""
    model = models.gpt(dropout=0.1)
    plan = compare(model, "vsync", stages, depths, max_grad_norm=clip)
    assert [one.stages for one in plan.tied] == [(0, stages - 1)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "schedule", "clip"), [("convnet", "stash", None), ("gpt", "vsync", 0.1)]
)
def test_recomputing_changes_no_bit(name: str, schedule: str, clip: float | None) -> None:
    """Forward runs again on the version that it ran on, with the same draws and statistics."""
    again = (True, False, True)
    plan = compare(getattr(models, name)(), schedule, 3, max_grad_norm=clip, recompute=again)
    assert tuple(stage.recompute for stage in plan.stages) == again


def in_between(t: int, pipe: Any) -> None:
    """Flushes, evaluations, states and changes of the newest weights, in mid-stream."""
    model = pipe.to_model() if t in (3, 5) else None
    if t == 1:
        pipe.flush()
    if t in (2, 7):
        x, y = models.batch_for(pipe.to_model(), 5, 100 + t)
        pipe.eval_step(x, target=y)
        pipe.predict(x)
    if t == 3:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
    if t == 5:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.99


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "schedule", "clip"),
    [("mlp", "stash", None), ("convnet", "stash", None), ("gpt", "vsync", 0.1)],
)
def test_what_comes_between_changes_no_version(
    name: str, schedule: str, clip: float | None
) -> None:
    compare(getattr(models, name)(), schedule, 3, (3, 1, 0), in_between, max_grad_norm=clip)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["stash", "vsync"])
def test_loaded_weights_begin_a_history(schedule: str) -> None:
    def load(t: int, pipe: Any) -> None:
        if t in (3, 4):
            state = {name: 0.9 * tensor for name, tensor in pipe.full_state_dict().items()}
            pipe.load_state_dict(state)
        elif t == 6:
            pipe.load_state_dict({"layers.0.weight": torch.ones(16, 16)}, position=2)

    compare(models.mlp(), schedule, 3, events=load)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["stash", "vsync"])
def test_weights_in_flight_are_not_changed_nor_gradients_of_the_users(schedule: str) -> None:
    model = models.mlp()
    last = model.layers[-1].weight  # of a stage with one version, under stash
    twin, options = copy.deepcopy(model), options_of(model, schedule)
    pipe = prepared(model, (), stages=2, **options)
    expected = pdcompile.reference(twin, plan=pipe.plan, **options)
    x, y = models.batch_for(model, 4)
    last.grad = torch.ones_like(last)
    for _ in range(3):
        assert float(pipe.step(x, target=y).loss) == float(expected.step(x, target=y).loss)
    assert torch.equal(last.grad, torch.ones_like(last))
    with torch.no_grad():
        last.mul_(0.5)
    with pytest.raises(ConfigError, match="in flight"):
        pipe.step(x, target=y)
    with pytest.raises(ConfigError, match="in flight"):
        pipe.close()


def test_an_older_version_is_not_written() -> None:
    model = models.mlp()
    pipe = prepared(model, (), stages=3, **options_of(model, "stash"))
    x, y = models.batch_for(model, 4)
    views = []
    for _ in range(4):
        views.append(model.layers[0].weight.data)
        pipe.step(x, target=y)
        pipe.flush()
    views[2].mul_(0.5)
    with pytest.raises(ConfigError, match="an older version of this parameter was written"):
        pipe.step(x, target=y)


def test_what_needs_all_stages_at_once_is_refused_under_stash() -> None:
    model = models.gpt()
    with pytest.raises(PdcompileError, match="differ in age under 'stash'") as caught:
        by_hand(model, 2, *models.batch_for(model, 4), **options_of(model, "stash")).prepare()
    assert "'2bw' or 'vsync'" in str(caught.value.remedy)
    pipe = prepared(models.mlp(), (), stages=2, **options_of(models.mlp(), "stash"))
    with pytest.raises(ConfigError, match="older weights"):
        pipe.forward_backward(torch.ones(4, 16), target=torch.ones(4, 16))


class Scaled(nn.Module):
    """Layers whose weights are used twice, by a norm and by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight / weight.norm())
        return x


def test_users_of_a_parameter_are_planned_on_one_stage_under_stash() -> None:
    torch.manual_seed(0)
    model = Scaled()
    twin = copy.deepcopy(model)
    options = options_of(models.mlp(), "stash")
    x, y = models.batch_for("mlp", 4)
    pipe = pdcompile.compile(model, stages=2, **options).prepare(x, target=y)
    assert not pipe.plan.tied
    plain = pdcompile.reference(
        twin, plan=pipe.plan, loss_fn=options["loss_fn"], optimizer=options["optimizer"]
    )
    for one in (pipe, plain):
        for _ in range(5):
            one.step(x, target=y)
        one.flush()
    assert states_equal(pipe.state_dict(), plain.state_dict()) == []


def test_a_parameter_at_both_ends_takes_the_model_to_one_stage_under_stash() -> None:
    model = models.gpt()
    pipe = prepared(model, (), stages=2, **options_of(model, "stash"))
    assert not pipe.plan.tied
    assert len([stage for stage in pipe.plan.stages if "wte.weight" in stage.parameters]) == 1


TRAIN = """
    import copy, sys
    from functools import partial
    import torch
    import pdcompile
    from tests.helpers import models

    for schedule, build, clip in (("stash", models.mlp, None),
                                  ("vsync", partial(models.gpt, layers=2, dropout=0.1), 0.1)):
        model = build()
        twin = copy.deepcopy(model)
        common = dict(loss_fn=models.loss_for(model), schedule=schedule, max_grad_norm=clip,
                      optimizer=partial(torch.optim.AdamW, lr=1e-2))
        batches = [models.batch_for(model, n, t) for t, n in enumerate((4, 4, 4, 3, 4, 4, 4, 4))]

        def train(pipe):
            losses = [pipe.step(x, target=y).loss for x, y in batches[:5]]
            x, y = batches[0]
            losses.append(pipe.eval_step(x, target=y).loss)
            losses += [pipe.step(x, target=y).loss for x, y in batches[5:]]
            return [float(loss) for loss in losses]

        pipe = pdcompile.compile(model, costs="estimated", progress=False, **common)
        losses, plan, rank = train(pipe), pipe.plan, pipe.ranks[0]
        state = pipe.full_state_dict()
        pipe.close()
        expected = pdcompile.reference(twin, plan=plan, **common)
        assert losses == train(expected), (rank, schedule)
        wanted = expected.full_state_dict() if rank == 0 else {}
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in wanted), schedule
        print(f"<{schedule} equal on {rank}>", flush=True)
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    run = processes(TRAIN, 2, tmp_path)
    assert run.code == 0, str(run)
    for schedule in ("stash", "vsync"):
        for rank in range(2):
            assert f"<{schedule} equal on {rank}>" in run.output, str(run)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_torchrun(tmp_path: Path, num_ranks: int) -> None:
    run = torchrun(TRAIN.replace("layers=2", "layers=4"), num_ranks, tmp_path)
    assert run.code == 0, str(run)
    assert run.output.count(" equal on ") == 2 * num_ranks, str(run)
