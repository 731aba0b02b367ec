"""Buffers that a forward fills, in the hands of the user's optimizer: QK-clip."""

from __future__ import annotations

import copy
import itertools
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from examples import kimi
from pdcompile.eager.optimizers import NamedParameters
from pdcompile.errors import ConfigError
from tests.helpers.launch import processes

COMMON: dict[str, Any] = {
    "loss_fn": kimi.loss_fn,
    "microbatches": 4,
    "costs": "estimated",
    "constraints": kimi.LAYERS,
    "verify": "off",  # what training comes to is compared,
    "time_limit": 0,  # and any plan will do
}
LIMIT = 0.05  # which the logits of some heads exceed
REPLICAS = {"schedule": "1f1b", "stages": 2, "replicas": 2, "cluster": "1x4"}
BATCHES = list(itertools.islice(kimi.batches(16), 2))


def compiled(model: torch.nn.Module, **options: Any) -> pdcompile.Pipeline:
    x, y = BATCHES[0]
    given = {"optimizer": partial(kimi.optimizer, limit=LIMIT), "schedule": "interleaved+1"}
    return pdcompile.compile(
        model, x, example_target=y, **{**COMMON, **given, "stages": 4, "cluster": "1x2", **options}
    )


def model(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    return kimi.Model(layers=layers)


def eager(made: torch.nn.Module, limit: float, replicas: int = 1) -> dict[str, torch.Tensor]:
    """Gradient accumulation in plain PyTorch; each replica sums its microbatches before all do.

    Muon works in bfloat16, where another order of sums is another update.
    """
    named = NamedParameters(made.named_parameters(), lambda name, _: made.get_buffer(name))
    optimizers = kimi.optimizer(named, limit)
    for x, y in BATCHES:
        parts, sums = list(zip(x.chunk(4), y.chunk(4), strict=True)), []
        for replica in range(replicas):
            made.zero_grad()
            for a, b in parts[replica::replicas]:
                (kimi.loss_fn(made(a), b) / 4).backward()
            sums.append([one.grad for one in made.parameters()])
        for one, *grads in zip(made.parameters(), *sums, strict=True):
            one.grad = torch.stack(grads).sum(0) if replicas > 1 else grads[0]
        for one in optimizers:
            one.step()
    return dict(made.state_dict())


@cache
def clipped_and_free() -> tuple[dict[str, torch.Tensor], ...]:
    """Weights in plain PyTorch with the limit and without one, and those of the reference."""
    reference = pdcompile.reference(
        model(4), optimizer=partial(kimi.optimizer, limit=LIMIT),
        schedule="1f1b", loss_fn=kimi.loss_fn, microbatches=4,
    )  # fmt: skip
    for x, y in BATCHES:
        reference.step(x, target=y)
    return eager(model(4), LIMIT), eager(model(4), 1e9), reference.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "1f1b", "stages": 2},
        {"schedule": "zb-h1", "stages": 2, "recompute": True},
    ],
    ids=["interleaved", "1f1b", "recomputed"],
)
def test_clipped_as_in_plain_pytorch(options: dict[str, Any]) -> None:
    """One dense layer and three with experts; a clip that shrinks, by peaks of all microbatches."""
    expected, free, reference = clipped_and_free()
    with compiled(model(4), **options) as pipe:
        for x, y in BATCHES:
            pipe.step(x, target=y)
        found = pipe.state_dict()
    for name, value in reference.items():
        assert torch.equal(found[name], value), name
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=2e-5)
    query = "layers.0.attention.query.weight"
    assert not torch.allclose(free[query], expected[query], atol=1e-3)


@pytest.mark.parametrize("updates", ["every", "home"])
def test_muon_on_replicas_of_several_stages_a_rank(updates: str) -> None:
    """Whole matrices, each at one replica's home; nothing is clipped."""

    def optimizer(parameters: Any) -> list[torch.optim.Optimizer]:
        parameters.buffer = lambda *_: torch.zeros(1)
        return kimi.optimizer(parameters)

    made = model(4)
    expected = eager(copy.deepcopy(made), 1e9, replicas=2)
    options = {"replicas": 2, "cluster": "1x4", "updates": updates, "optimizer": optimizer}
    with compiled(made, **options) as pipe:
        for x, y in BATCHES:
            pipe.step(x, target=y)
        found = pipe.state_dict()
    for name in dict(made.named_parameters()):
        torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"schedule": "2bw", "stages": 2}, "later minibatches write it"),
        ({**REPLICAS, "over": ()}, r"each replica .*\n.*\n.*\"max\"\) for the largest"),
        ({**REPLICAS, "over": ("sum",)}, "asks for 'sum'"),
        ({**REPLICAS, "updates": "home"}, "replicas of its stage step .* homes"),
    ],
)
def test_what_a_step_would_find_otherwise_is_refused(options: dict[str, Any], match: str) -> None:
    over, made = options.pop("over", ("max",)), model()

    def optimizer(parameters: Any) -> list[torch.optim.Optimizer]:
        known = parameters.buffer
        parameters.buffer = lambda name, _: known(name, *over)
        return kimi.optimizer(parameters)

    with pytest.raises(ConfigError, match=match):
        compiled(made, optimizer=optimizer, **options).prepare()


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"schedule": "interleaved+1", "stages": 4}, marks=pytest.mark.slow)],
)
def test_replicas_clip_by_the_largest_of_all(options: dict[str, Any]) -> None:
    """Replicas of one process share the update that one of them makes; states are read between."""
    made = model(options.get("stages", 2))
    expected = eager(copy.deepcopy(made), LIMIT, replicas=2)
    with compiled(made, **REPLICAS | {"verify": "auto"} | options) as pipe:
        for x, y in BATCHES:
            pipe.step(x, target=y)
            peaks = [one for name, one in pipe.state_dict().items() if name.endswith("peak")]
            assert not any(one.any() for one in peaks)  # the step sets them back, on each
        found = pipe.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=2e-5)


RANKS = """
    from functools import partial
    import copy, torch, pdcompile
    from examples import kimi
    from tests.test_optimizer_buffers import BATCHES, COMMON, LIMIT, REPLICAS, eager, model

    made = model()
    options = {k: v for k, v in (COMMON | REPLICAS).items() if k != "cluster"}
    optimizer = partial(kimi.optimizer, limit=LIMIT)
    for own_loop in (False, True):
        with pdcompile.compile(copy.deepcopy(made), optimizer=optimizer, **options) as pipe:
            for x, y in BATCHES:
                if own_loop:
                    pipe.forward_backward(x, target=y)
                    pipe.optimizer.step()
                    pipe.optimizer.zero_grad()
                else:
                    pipe.step(x, target=y)
            found = pipe.full_state_dict()
            if pipe.ranks == (0,):
                expected = eager(copy.deepcopy(made), LIMIT, replicas=2)
                worst = max((found[k] - v).abs().max().item() for k, v in expected.items())
                print(f"AGREE {worst <= 2e-5} {worst:.1e} {own_loop}")
    try:
        options |= {"parts": 2, "replicas": 1}
        pdcompile.compile(made, x, example_target=y, optimizer=optimizer, **options).prepare()
    except pdcompile.ConfigError as error:
        print("REFUSED", error.message)
"""


def test_replicas_on_ranks_clip_by_the_largest_of_all(tmp_path: Path) -> None:
    run = processes(RANKS, 4, tmp_path)
    assert run.code == 0, run
    assert run.output.count("AGREE True") == 2, run
    assert (
        run.output.count("REFUSED the optimizer asks for this buffer, and parts of its stage") == 4
    ), run


def test_a_cut_through_what_a_step_changes_together() -> None:
    """Query and key of one attention on two stages: one step would change another stage's."""
    cut = [pdcompile.Pin("layers.1.attention.query", 0), pdcompile.Pin("layers.1.attention.key", 1)]
    with pytest.raises(ConfigError, match="changes parameters of another one"):
        compiled(model(), schedule="1f1b", stages=2, constraints=cut).prepare()


def test_a_buffer_that_there_is_not() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        parameters.buffer("layers.0.peak")
        return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(ConfigError, match="no stage of this rank"):
        compiled(model(), optimizer=optimizer, schedule="1f1b", stages=2).prepare()


def test_a_step_finds_a_buffer_that_training_only_reads() -> None:
    """The buffer is found under any schedule: nothing changes it."""
    made = model()
    made.register_buffer("rate", torch.tensor(0.5))
    made.head.register_forward_pre_hook(lambda module, args: (args[0] * made.rate,))
    seen: list[float] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        seen.append(float(parameters.buffer("rate")))
        return torch.optim.SGD(parameters, lr=0.1)

    compiled(made, optimizer=optimizer, schedule="2bw", stages=2).prepare()
    assert 0.5 in seen


class Rebinding(nn.Module):
    """Its forward puts another tensor in the place of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        self.peak = torch.maximum(self.peak, found.detach().amax())
        output: torch.Tensor = self.last(found.relu())
        return output


def test_a_step_finds_what_a_forward_puts_in_a_buffers_place() -> None:
    """The reference too, whose modules are the user's."""
    seen: dict[int, list[float]] = {}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        peak, own = parameters.buffer("peak"), seen.setdefault(len(seen), [])
        made.register_step_post_hook(lambda *_: own.append(float(peak)))
        return made

    torch.manual_seed(0)
    made, x, y = Rebinding(), torch.randn(8, 8), torch.randn(8, 8)
    given: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "microbatches": 4}
    expected = pdcompile.reference(copy.deepcopy(made), optimizer=optimizer, **given)
    theirs = seen[len(seen) - 1]
    pipe = pdcompile.compile(
        made, x, example_target=y, optimizer=optimizer, stages=1, costs="estimated",
        verify="off", **given,
    )  # fmt: skip
    for _ in range(3):
        for one in (pipe, expected):
            one.step(x, target=y)
    assert theirs == seen[len(seen) - 1]
    assert len(theirs) == 3
    assert min(theirs) > 0.0
