"""Several stages on one rank, running: bit for bit what the reference computes."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pdcompile
from pdcompile.passes.check import check
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, loss_for, mlp, unet
from tests.helpers.pipelines import by_hand, states_equal
from tests.test_runtime_distributed import COMMON


@pytest.mark.parametrize(
    ("build", "ranks"),
    [
        (mlp, (0, 0, 0, 0)),
        (unet, (0, 0, 1, 1)),
        (unet, (0, 1, 0, 1)),
        (partial(gpt, tied=True), (0, 1, 0, 1)),
        (partial(gpt, tied=True), (0, 1, 1, 0)),
    ],
)
def test_in_one_process(build: Any, ranks: tuple[int, ...]) -> None:
    """Skips, tied weights, clipping, a short minibatch, evaluation, gradients without update."""
    model = build()
    x, y = batch_for(model, 8)
    options: dict[str, Any] = {
        "loss_fn": loss_for(model), "optimizer": partial(torch.optim.AdamW, lr=0.05),
        "schedule": "gpipe", "microbatches": 4, "max_grad_norm": 0.5,
    }  # fmt: skip
    expected = pdcompile.reference(deepcopy(model), **options)
    pipe = by_hand(model, 4, (x,), y, ranks=ranks, **options)
    for size in (8, 3, 8):
        ours = pipe.step(x[:size], target=y[:size]).loss
        theirs = expected.step(x[:size], target=y[:size]).loss
        assert ours is not None
        assert theirs is not None
        assert ours.item() == theirs.item()
    assert torch.equal(pipe.predict(x), expected.predict(x))
    for one in (pipe, expected):
        one.forward_backward(x, target=y)
        one.clip_grad_norm_(0.1)
        one.optimizer.step()
        one.zero_grad()
        one.step(x, target=y)
    assert states_equal(pipe.full_state_dict(), expected.full_state_dict()) == []
    assert pipe.stages == (0, 1, 2, 3)
    assert pipe.ranks == tuple(sorted(set(ranks)))
    check(pipe.plan)


TORCHRUN = (
    COMMON
    + """
for build, ranks in ((models.unet, (0, 1, 0, 1)), (partial(models.gpt, tied=True), (0, 1, 1, 0))):
    pipe, eager = pair(build(), "gpipe", 4, outputs="all", max_grad_norm=0.3, ranks=ranks)
    for t, size in enumerate([8, 3, 8]):
        inputs, target = models.batch_for(eager.to_model(), size, t)
        ours, theirs = (one.step(inputs, target=target) for one in (pipe, eager))
        assert float(ours.loss) == float(theirs.loss)
        assert torch.equal(ours.outputs, theirs.outputs)
    assert torch.equal(pipe.predict(inputs), eager.predict(inputs))
    full = pipe.full_state_dict()
    assert not states_equal(full, eager.full_state_dict() if rank == 0 else {})
    assert pipe.stages == tuple(s for s in range(4) if ranks[s] == rank)
    pipe.close()
say("equal")
"""
)


def test_on_two_ranks(tmp_path: Path) -> None:
    run = processes(TORCHRUN, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run
