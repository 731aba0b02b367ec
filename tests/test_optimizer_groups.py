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
from pdcompile.checkpoint.scheduler_states import SchedulerPart, merged_state
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
    """And as a loop of plain PyTorch that steps each."""
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


def test_a_group_keeps_its_own_learning_rate(tmp_path: Path) -> None:
    """Where groups were made otherwise; the same groups, cut otherwise, take what was saved."""
    one_group = partial(torch.optim.AdamW, lr=0.1)

    def two(parameters: Any) -> Any:
        named = [*parameters.named]
        near = [p for name, p in named if name[0] in "01"]
        far = [p for name, p in named if name[0] in "23"]
        groups = [{"params": near, "lr": 0.02, "weight_decay": 0.3}, {"params": far}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01, weight_decay=0.3)

    pipe = pipeline(optimizer=one_group)
    scheduler = lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
    pipe.step(batch(0)[0], target=batch(0)[1])
    scheduler.step()
    pipe.save(tmp_path / "one", schedulers=scheduler)
    whole = pipe.full_optimizer_state_dict()
    for load in (
        lambda pipe, one: pipe.load(tmp_path / "one", schedulers=one),
        lambda pipe, one: pipe.load_optimizer_state_dict(whole),
    ):
        other = pipeline(optimizer=two)
        fresh = lr_scheduler.ExponentialLR(other.optimizer, 0.5)
        with pytest.warns(UserWarning, match="0.0.weight, 2.0.weight .*keep their own learning"):
            load(other, fresh)
        groups = other.optimizer.param_groups
        assert [(g["lr"], g["initial_lr"], g["weight_decay"]) for g in groups] == [
            (0.02, 0.02, 0.01), (0.01, 0.01, 0.01),
        ]  # fmt: skip
        assert fresh.base_lrs == [0.02, 0.01]
        assert len(other.optimizer.state) == 8
    assert fresh.last_epoch == 0
    again = pipeline(stages=3, optimizer=one_group)
    with pytest.warns(UserWarning, match="scheduler 0, which was not handed"):
        again.load(tmp_path / "one")
    assert [g["lr"] for g in again.optimizer.param_groups] == [0.05]
    parts = pipeline(optimizer=two)
    for group in parts.optimizer.param_groups:
        group["lr"] *= 0.5
    parts.save(tmp_path / "two")
    joined = pipeline(optimizer=partial(one_group, weight_decay=0.3))
    with pytest.warns(UserWarning, match="keep their own"):
        joined.load(tmp_path / "two")
    assert [g["lr"] for g in joined.optimizer.param_groups] == [0.1]
    cut = pipeline(stages=4, optimizer=two)
    cut.load(tmp_path / "two")
    assert [g["lr"] for g in cut.optimizer.param_groups] == [0.01, 0.005]


# -- schedulers ------------------------------------------------------------------------------------

TWO = [
    SchedulerPart((("a",), ("b",)), {"base_lrs": [1.0, 2.0], "own": [1, 2], "n": 3, "x": (5, 6)}),
    SchedulerPart((("c",), ("d",)), {"base_lrs": [3.0, 4.0], "own": [3, 4], "n": 3, "x": (5, 6)}),
]


def test_states_of_schedulers_are_put_together_by_group() -> None:
    assert merged_state(TWO, [("c",), ("d",)], {}, (), "0") == TWO[1].state
    here = {"base_lrs": [0.0] * 3, "own": [0] * 3, "x": (5, 6)}
    found = merged_state(TWO, [("d",), ("a",), ()], here, (), "0")
    assert found == {"base_lrs": [4.0, 1.0, 0.0], "own": [4, 1, 0], "n": 3, "x": (5, 6)}
    kept = merged_state(TWO, [("d",), ("a",), ()], here, {0}, "0")
    assert kept["base_lrs"] == [0.0, 1.0, 0.0]
    nested = [part._replace(state={"_schedulers": [part.state, {}]}) for part in TWO]
    found = merged_state(nested, [("d",), ("a",), ()], {"_schedulers": [here, {}]}, (), "0")
    assert found["_schedulers"][0]["base_lrs"] == [4.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "own", "message"),
    [
        ({"n": 4}, [("a",), ("c",)], r"n of scheduler s is 3 on one rank.* and 4 on another"),
        ({}, [("a", "c"), ("b", "d")], "base_lrs of scheduler s is"),
        # Equal on both ranks: two values of any kind, or of groups that are in another order now?
        ({"own": [1, 2], "base_lrs": [1.0, 2.0]}, [("b",), ("a",)], "own of .* cannot be told"),
        ({"base_lrs": [1.0]}, [("c",), ("a",)], "base_lrs of scheduler s"),  # of another rank
    ],
)
def test_states_that_do_not_fit_are_refused(change: Any, own: Any, message: str) -> None:
    second = TWO[1]._replace(state={**TWO[1].state, **change})
    here = {"base_lrs": [0.0, 0.0], "own": [0, 0], "n": 0, "x": (0, 0)}
    with pytest.raises(CheckpointError, match=message) as caught:
        merged_state([TWO[0], second], own, here, (), "s")
    assert "the plan that it was saved with" in str(caught.value)


RANKS = """
    import random, sys, torch
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
    for schedule, ranks in (("1f1b", (0, 1)), ("interleaved", (0, 1, 0, 1))):
        pipe = pipeline(schedule, len(ranks), ranks=ranks)
        scheduled = schedulers(pipe.optimizer)
        pipe.load(folder, schedulers=scheduled)
        print("drew", torch.rand(1).item() == drawn)
        print("losses", losses + train(pipe, scheduled, 3, 6))
        print("rates", rates(pipe.optimizer))
        pipe.close()
"""


def test_ranks_with_unlike_groups_and_kinds_of_optimizers_go_on(tmp_path: Path) -> None:
    """On the same plan, with other groups on each rank, and in one process."""
    whole = pipeline()
    scheduled = schedulers(whole.optimizer)
    losses = train(whole, scheduled, 0, 6)
    expected = rates(whole.optimizer)
    assert len({rate for _, rate in expected}) == 4
    run = processes(RANKS, 2, tmp_path, str(tmp_path / "saved"))
    assert run.code == 0, str(run)
    assert run.output.count("drew True") == 4, str(run)
    assert run.output.count(f"losses {losses}") == 4, str(run)
    for layers in ((0, 1), (2, 3), (0, 2), (1, 3)):
        part = [pair for pair in expected if pair[0] in layers]
        assert run.output.count(f"rates {part}") == 1, str(run)
    alone = pipeline(stages=3)
    scheduled = schedulers(alone.optimizer)
    alone.load(tmp_path / "saved", schedulers=scheduled)
    assert train(alone, scheduled, 3, 6) == losses[3:]
    assert rates(alone.optimizer) == expected


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
