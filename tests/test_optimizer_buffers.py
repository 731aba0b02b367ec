"""Buffers that a forward fills, in the hands of the user's optimizer: QK-clip."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch

import pdcompile
from examples import kimi
from pdcompile.eager.optimizers import NamedParameters
from pdcompile.errors import ConfigError

COMMON: dict[str, Any] = {
    "loss_fn": kimi.loss_fn,
    "microbatches": 4,
    "costs": "estimated",
    "constraints": kimi.LAYERS,
}
LIMIT = 0.05  # which the logits of some heads exceed
BATCHES = list(itertools.islice(kimi.batches(16), 4))


def compiled(model: torch.nn.Module, **options: Any) -> pdcompile.Pipeline:
    x, y = BATCHES[0]
    given = {"optimizer": partial(kimi.optimizer, limit=LIMIT), "schedule": "interleaved+1"}
    return pdcompile.compile(
        model, x, example_target=y, **{**COMMON, **given, "stages": 4, "cluster": "1x2", **options}
    )


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return kimi.Model()


def eager(made: torch.nn.Module, limit: float, replicas: int = 1) -> dict[str, torch.Tensor]:
    """Gradient accumulation in plain PyTorch; each replica sums its microbatches before all do.

    Muon works in bfloat16, where another order of sums is another update.
    """
    optimizers = kimi.optimizer(NamedParameters(made.named_parameters(), made.get_buffer), limit)
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


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "1f1b", "stages": 2}, {"schedule": "zb-h1", "stages": 2, "recompute": True}],
    ids=["interleaved", "1f1b", "recomputed"],
)
def test_clipped_as_in_plain_pytorch(options: dict[str, Any]) -> None:
    """One dense layer and four with experts; a clip that shrinks, by peaks of all microbatches."""
    made = model()
    expected, free = eager(copy.deepcopy(made), LIMIT), eager(copy.deepcopy(made), 1e9)
    reference = pdcompile.reference(
        copy.deepcopy(made), optimizer=partial(kimi.optimizer, limit=LIMIT),
        schedule="1f1b", loss_fn=kimi.loss_fn, microbatches=4,
    )  # fmt: skip
    for x, y in BATCHES:
        reference.step(x, target=y)
    with compiled(made, **options) as pipe:
        for x, y in BATCHES:
            pipe.step(x, target=y)
        found = pipe.state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(found[name], value), name
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=2e-5)
    query = "layers.0.attention.query.weight"
    assert not torch.allclose(free[query], expected[query], atol=1e-3)


@pytest.mark.parametrize("updates", ["every", "home"])
def test_muon_on_replicas_of_several_stages_a_rank(updates: str) -> None:
    """Whole matrices, each at one replica's home; nothing is clipped."""

    def optimizer(parameters: Any) -> list[torch.optim.Optimizer]:
        parameters.buffer = lambda _: torch.zeros(1)
        return kimi.optimizer(parameters)

    made = model()
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
        ({"schedule": "1f1b", "stages": 2, "replicas": 2, "cluster": "1x4"}, "each replica"),
    ],
)
def test_what_a_step_would_find_otherwise_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        compiled(model(), **options).prepare()


def test_a_buffer_that_there_is_not() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        parameters.buffer("layers.0.peak")
        return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(ConfigError, match="no stage of this rank"):
        compiled(model(), optimizer=optimizer).prepare()


def test_a_step_finds_a_buffer_that_training_only_reads() -> None:
    """Under any schedule: nothing changes it."""
    made = model()
    made.register_buffer("rate", torch.tensor(0.5))
    made.head.register_forward_pre_hook(lambda module, args: (args[0] * made.rate,))
    seen: list[float] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        seen.append(float(parameters.buffer("rate")))
        return torch.optim.SGD(parameters, lr=0.1)

    compiled(made, optimizer=optimizer, schedule="2bw", stages=2).prepare()
    assert 0.5 in seen
