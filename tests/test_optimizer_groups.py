"""Several optimizers as one, groups that are others on each rank, and their schedulers."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import pdcompile
from pdcompile.checkpoint.extra_states import fitting_state
from pdcompile.checkpoint.manifest import StoredScheduler
from pdcompile.eager.optimizers import make_optimizer
from pdcompile.errors import CheckpointError, ConfigError
from tests.helpers.launch import processes
from tests.helpers.loops import same as equal_models
from tests.helpers.pipelines import by_hand
from tests.helpers.resuming import same


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


def batch(t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def several(parameters: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW for vectors, with a group a layer: the deeper the faster."""
    made = []
    for kind, ndim in ((torch.optim.Muon, 2), (torch.optim.AdamW, 1)):
        layers: dict[int, list[Any]] = {}
        for name, parameter in parameters.named:
            if parameter.ndim == ndim:
                layers.setdefault(int(name.split(".")[0]), []).append(parameter)
        groups = [{"params": own, "lr": 0.01 * (n + 1), "layer": n} for n, own in layers.items()]
        made += [kind(groups)] if groups else []
    return made


def pipeline(schedule: str = "1f1b", stages: int = 2, **options: Any) -> Any:
    given = {"optimizer": several, "loss_fn": F.mse_loss, "microbatches": 4, **options}
    return by_hand(model(), stages, *batch(0), schedule=schedule, **given).prepare()


def schedulers(optimizer: Any) -> list[Any]:
    """Layers warm up one after the other and then decay; and rates fall to a minimum of each."""
    layers = [group["layer"] for group in optimizer.param_groups]
    warm = lr_scheduler.LambdaLR(
        optimizer, [lambda t, n=n: min(1.0, (t + 1) / (n + 2)) for n in layers]
    )
    decay = lr_scheduler.ExponentialLR(optimizer, 0.5)
    plateau = lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, min_lr=[0.006 * (n + 1) for n in layers]
    )
    return [lr_scheduler.SequentialLR(optimizer, [warm, decay], [2]), plateau]


def train(runner: Any, scheduled: list[Any], first: int, last: int) -> list[float]:
    losses = []
    for t in range(first, last):
        x, y = batch(t)
        losses.append(float(runner.step(x, target=y).loss))
        scheduled[0].step()
        scheduled[1].step(1.0 + t)
    runner.flush()
    return losses


def rates(optimizer: Any) -> list[tuple[int, float]]:
    return sorted((group["layer"], group["lr"]) for group in optimizer.param_groups)


# -- several optimizers ----------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_several_optimizers_train_as_the_reference(schedule: str) -> None:
    """They train as a loop of plain PyTorch does that steps each."""
    given = {"loss_fn": F.mse_loss, "microbatches": 4, "optimizer": several, "max_grad_norm": 0.5}
    pipe = pipeline(schedule, **given)
    reference = pdcompile.reference(model(), schedule=schedule, **given)
    assert isinstance(pipe.optimizer, torch.optim.Optimizer)
    ours, theirs = schedulers(pipe.optimizer), schedulers(reference.optimizer)
    assert train(pipe, ours, 0, 5) == train(reference, theirs, 0, 5)
    equal_models(pipe.to_model(), reference.to_model())
    assert rates(pipe.optimizer) == rates(reference.optimizer)
    if schedule == "2bw":
        return
    plain = model()
    made = several(pdcompile.eager.optimizers.NamedParameters(plain.named_parameters()))
    for t in range(5):
        x, y = batch(t)
        plain.zero_grad()
        for own, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.mse_loss(plain(own), target) / 4).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for one in made:
            one.step()
    again = pipeline("1f1b", **given)
    for t in range(5):
        again.step(batch(t)[0], target=batch(t)[1])
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_several_optimizers_are_one() -> None:
    pipe = pipeline()
    train(pipe, schedulers(pipe.optimizer), 0, 2)
    optimizer = pipe.optimizer
    muon, adam = optimizer.optimizers
    assert [*optimizer.param_groups] == [*muon.param_groups, *adam.param_groups]
    assert len(optimizer.state) == len(muon.state) + len(adam.state) == 8
    state = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(optimizer)
    optimizer.state.clear()
    assert not muon.state
    optimizer.load_state_dict(state)
    assert same(optimizer.state_dict(), state)
    assert same(twin.state_dict(), state)
    assert optimizer.state.get(nn.Parameter(torch.ones(1))) is None
    for wrong in (
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        lambda: setattr(optimizer, "param_groups", []),
    ):
        with pytest.raises(ConfigError, match="several optimizers"):
            wrong()
    lr_scheduler.StepLR(adam, 1).step()
    pipe.step(batch(0)[0], target=batch(0)[1])
    assert optimizer.param_groups[-1]["lr"] == adam.param_groups[-1]["lr"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda parameters: [], "returned no optimizer for 0.0.weight, 0.0.bias"),
        (lambda parameters: [3], "returned int, not"),
        (lambda parameters: [torch.optim.SGD(parameters, lr=0.1)] * 2, "two of the optimizers"),
    ],
)
def test_lists_that_are_no_optimizers_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline(optimizer=build)


def test_several_optimizers_go_on_in_plain_pytorch_and_refuse_another(tmp_path: Path) -> None:
    pipe = pipeline()
    train(pipe, schedulers(pipe.optimizer), 0, 3)
    pipe.save(tmp_path)
    plain = model(3)
    made = several(pdcompile.eager.optimizers.NamedParameters(plain.named_parameters()))
    pdcompile.load_checkpoint(tmp_path, plain, made[::-1])
    assert sorted(rates(made[0]) + rates(made[1])) == rates(pipe.optimizer)
    assert same(made[1].state_dict()["state"], pipe.optimizer.optimizers[1].state_dict()["state"])
    alone = torch.optim.AdamW(plain.parameters())
    with pytest.raises(CheckpointError, match=r"0.0.weight: .* state of Muon, and this .* AdamW"):
        pdcompile.load_checkpoint(tmp_path, plain, alone)


# -- other groups ----------------------------------------------------------------------------------


def one_group(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1)


def two(parameters: Any) -> Any:
    """Nearer and farther layers; a rank may have both, or one."""
    named = [*parameters.named]
    near = [p for name, p in named if name[0] in "01"]
    far = [p for name, p in named if name[0] in "23"]
    groups = [{"params": near, "lr": 0.02, "weight_decay": 0.3}, {"params": far}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01)


def settings(pipe: Any) -> list[tuple[float, float]]:
    return [(g["lr"], g["weight_decay"]) for g in pipe.optimizer.param_groups]


def test_a_group_keeps_its_own_learning_rate(tmp_path: Path) -> None:
    """A checkpoint restores the rates of the same groups, and leaves those of other groups."""
    pipe = pipeline(optimizer=one_group)
    scheduler = lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
    pipe.step(batch(0)[0], target=batch(0)[1])
    scheduler.step()
    pipe.save(tmp_path / "one")
    pipe.save(tmp_path / "scheduled", schedulers=scheduler)
    whole = pipe.full_optimizer_state_dict()
    loads: list[Any] = [
        lambda pipe: pipe.load(tmp_path / "one"),
        lambda pipe: pipe.load_optimizer_state_dict(whole),
    ]
    for load in loads:
        other = pipeline(optimizer=two)
        with pytest.warns(UserWarning, match="0.0.weight, 2.0.weight .*keep their own learning"):
            load(other)
        assert settings(other) == [(0.02, 0.3), (0.01, 0.01)]
        assert len(other.optimizer.state) == 8
    fresh = lr_scheduler.ExponentialLR(other.optimizer, 0.5)
    with pytest.raises(CheckpointError, match="this rank has others than those that it was saved"):
        other.load(tmp_path / "scheduled", schedulers=fresh)
    assert fresh.last_epoch == 0
    parts = pipeline(optimizer=two)
    parts.save(tmp_path / "two")
    joined = pipeline(optimizer=one_group)
    with pytest.raises(CheckpointError, match=r"were saved with weight_decay=0\.3 and 0\.01"):
        joined.load(tmp_path / "two")
    assert settings(joined) == [(0.1, 0.01)]
    cut = pipeline(stages=4, optimizer=two)
    cut.load(tmp_path / "two")
    assert settings(cut) == [(0.02, 0.3), (0.01, 0.01)]


# -- schedulers ------------------------------------------------------------------------------------


def saved_as(groups: Any, state: Any) -> StoredScheduler:
    return StoredScheduler("s", "StepLR", groups, state)


@pytest.mark.parametrize(
    ("own", "second", "message"),
    [
        ((("c",), ("d",)), 3, None),  # this rank has what one of those had
        ((("a", "c"), ("b", "d")), 3, None),
        ((("a", "c"), ("b", "d")), 4, "those of ranks that saved unlike states of it"),
        ((("a",), ("c",), ("b", "d")), 3, "others than those that it was saved with"),
        ((("b", "d"), ("a", "c")), 3, "others than those that it was saved with"),
    ],
)
def test_states_of_schedulers_fit_the_groups_that_they_were_saved_with(
    own: Any, second: int, message: str | None
) -> None:
    parts = [saved_as((("a",), ("b",)), {"n": 3}), saved_as((("c",), ("d",)), {"n": second})]
    if message is None:
        assert fitting_state(parts, own) == {"n": 3}
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        fitting_state(parts, own)
    assert "the plan that it was saved with" in str(caught.value)


RANKS = """
    import sys, torch
    import pdcompile
    from pathlib import Path
    from tests.test_optimizer_groups import pipeline, rates, schedulers, train

    folder = Path(sys.argv[1])
    rank = int(__import__("os").environ["RANK"])
    torch.manual_seed(rank)
    pipe = pipeline()
    scheduled = schedulers(pipe.optimizer)
    losses = train(pipe, scheduled, 0, 3)
    pipe.save(folder, schedulers=scheduled)
    drawn = torch.rand(1).item()
    pipe.close()
    pipe = pipeline("interleaved", 4, ranks=(0, 1, 0, 1))
    try:
        pipe.load(folder, schedulers=schedulers(pipe.optimizer))
    except pdcompile.CheckpointError as error:
        print("refused", error.message)
    pipe.close()
    pipe = pipeline()
    scheduled = schedulers(pipe.optimizer)
    pipe.load(folder, schedulers=scheduled)
    print("drew", torch.rand(1).item() == drawn)
    print("losses", losses + train(pipe, scheduled, 3, 6))
    print("rates", rates(pipe.optimizer))
    pipe.close()
"""


@pytest.mark.slow
def test_ranks_with_unlike_groups_and_kinds_of_optimizers_go_on(tmp_path: Path) -> None:
    """They go on with the same plan; on others the optimizers do, and schedulers that are made
    anew."""
    whole = pipeline()
    scheduled = schedulers(whole.optimizer)
    losses = train(whole, scheduled, 0, 6)
    expected = rates(whole.optimizer)
    assert len({rate for _, rate in expected}) == 4
    run = processes(RANKS, 2, tmp_path, str(tmp_path / "saved"))
    assert run.code == 0, str(run)
    assert run.output.count("goes by the groups of its optimizer") == 2, str(run)
    assert run.output.count("drew True") == 2, str(run)
    assert run.output.count(f"losses {losses}") == 2, str(run)
    for layers in ((0, 1), (2, 3)):
        part = [pair for pair in expected if pair[0] in layers]
        assert run.output.count(f"rates {part}") == 1, str(run)
    alone = pipeline(stages=3)
    with pytest.warns(UserWarning, match="scheduler 0, 1, which was not handed"):
        alone.load(tmp_path / "saved")
    half = pipeline()
    scheduled = schedulers(half.optimizer)
    train(half, scheduled, 0, 3)
    assert rates(alone.optimizer) == rates(half.optimizer)
    assert float(alone.step(batch(3)[0], target=batch(3)[1]).loss) == losses[3]


# -- clipping --------------------------------------------------------------------------------------


class Mix(nn.Module):
    """Multiplies by a complex matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.cfloat) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x * 0.5) @ self.weight
        return z.real - z.imag * 0.3


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_complex_parameters_are_clipped_as_in_the_reference(schedule: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), Mix(), nn.Linear(6, 6), nn.Linear(6, 3))

    given = {
        "loss_fn": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.05), "microbatches": 3,
        "max_grad_norm": 0.5, "schedule": schedule,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 6, generator=generator), torch.randn(9, 3, generator=generator)
    pipe, reference = by_hand(make(), 3, x, y, **given), pdcompile.reference(make(), **given)
    for t in range(12):
        pipe.step(x * (1 + 0.1 * t), target=y)
        reference.step(x * (1 + 0.1 * t), target=y)
    assert same(pipe.full_state_dict(), reference.full_state_dict())


def test_a_rank_may_have_nothing_to_update() -> None:
    """A callable that takes none of a rank's parameters gets one without elements, or none."""
    frozen = [("body", nn.Parameter(torch.ones(2), requires_grad=False))]
    head = [("head", nn.Parameter(torch.ones(2, 2, 2)))]
    makes = {
        "by gradient": lambda ps: torch.optim.AdamW([p for p in ps if p.requires_grad], lr=0.5),
        "by name": lambda ps: torch.optim.AdamW([p for n, p in ps.named if n == "head"]),
        "a list": lambda ps: [torch.optim.AdamW(x) for x in [[p for p in ps if p.ndim > 2]] if x],
    }
    for name, make in makes.items():
        made = make_optimizer(make, frozen, head)
        assert made is not None
        held = [p for group in made.param_groups for p in group["params"]]
        assert [p.numel() for p in held] == [0], name
        with pytest.raises((ValueError, ConfigError)):
            make_optimizer(make, frozen)
        with pytest.raises((ValueError, ConfigError)):  # nothing of any rank would be updated
            make_optimizer(make, frozen, [("tail", frozen[0][1])])
    assert make_optimizer(makes["by gradient"], frozen, head).defaults["lr"] == 0.5
