"""Weights on several stages, which sum what they have accumulated once an update."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile import CutBefore
from pdcompile.errors import ConfigError
from pdcompile.passes.schedules import make_stream
from pdcompile.schedule import Action
from pdcompile.schedule.registry import KINDS
from tests.helpers.pipelines import states_equal

ADAM = partial(torch.optim.Adam, lr=0.01)


class Shared(nn.Module):
    """One weight in three modules, and read by forward itself."""

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.l1, self.l2, self.l3 = (
            nn.Embedding(11, 8),
            *map(nn.Linear, [8] * 3, [8] * 3),
        )
        self.mid, self.head = nn.Linear(8, 11, bias=False), nn.Linear(8, 11, bias=False)
        self.mid.weight = self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.l2(self.l1(self.emb(x))))
        h = h + self.mid(h)[:, :8] + self.emb.weight[3]
        return self.head(self.l3(h))


class AtBothEnds(Shared):
    """Model in which, in the region of autocast, a weight is cast once, for all of its products."""

    captured_once = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.l3(torch.relu(self.l2(self.l1(self.emb(x))))))


def models(hook: Any = None, kind: type[Shared] = Shared) -> tuple[Shared, Shared]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(kind())
        if hook is not None:
            hook(found[-1].emb.weight)
    return found[0], found[1]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,))) for _ in range(count)]


def compiled(model: nn.Module, **options: Any) -> pdcompile.Pipeline:
    """Pipeline of three stages, each of which has the weight."""
    x, y = batches(1)[0]
    pipe = pdcompile.compile(
        model, cluster=pdcompile.Cluster.local(3), stages=3, costs="estimated", progress=False,
        constraints=[CutBefore("l2"), CutBefore("l3")], **options,
    )  # fmt: skip
    pipe.prepare(x, target=y)
    ends = isinstance(model, AtBothEnds)
    assert pipe.plan.tied[0].stages == ((0, 2) if ends else (0, 1, 2))
    return pipe


def cubed(weight: nn.Parameter) -> None:
    weight.register_hook(lambda gradient: gradient * gradient.abs())


def decayed(weight: nn.Parameter) -> None:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(parameter.detach(), alpha=0.1)

    weight.register_post_accumulate_grad_hook(hook)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:the loss is not linear")
@pytest.mark.parametrize(
    ("schedule", "hook", "clip", "recompute"),
    [
        ("1f1b", cubed, 0.1, True),
        ("1f1b", decayed, None, False),
        ("zb-h1", decayed, None, False),
        ("2bw", None, None, False),
        ("2bw", decayed, 0.1, True),
        ("vsync", cubed, None, False),
    ],
)
def test_training_is_that_of_the_plans_reference(
    schedule: str, hook: Any, clip: float | None, recompute: bool
) -> None:
    """They are equal to the last bit, hooks (once, on the sum) and a user's own loop among it."""
    model, twin = models(hook)
    options: dict[str, Any] = {
        "loss_fn": F.cross_entropy, "optimizer": ADAM, "schedule": schedule, "max_grad_norm": clip,
    }  # fmt: skip
    pipe = compiled(
        model, microbatches=1 if KINDS[schedule].updates_each else 4, recompute=recompute, **options
    )
    eager = pdcompile.reference(twin, plan=pipe.plan, **options)
    for x, y in batches(5):
        ours, theirs = pipe.step(x, target=y), eager.step(x, target=y)
        assert float(ours.loss) == float(theirs.loss)
    if not KINDS[schedule].stream and clip is None:
        for one in (pipe, eager):
            for x, y in batches(2):
                one.forward_backward(x, target=y)
        wanted = dict(eager.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, wanted[name].grad), name
    assert states_equal(pipe.full_state_dict(), eager.full_state_dict()) == []
    pipe.close()


def test_replicas_sum_what_they_have_and_hooks_run_on_the_whole() -> None:
    model, twin = models(cubed)
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": ADAM}
    x, y = batches(1)[0]
    pipe = pdcompile.compile(
        model, cluster=pdcompile.Cluster.local(6), stages=3, replicas=(1, 2, 3), microbatches=4,
        costs="estimated", progress=False, constraints=[CutBefore("l2"), CutBefore("l3")],
        verify="off", **options,
    )  # fmt: skip
    pipe.prepare(x, target=y)
    eager = pdcompile.reference(twin, plan=pipe.plan, **options)
    for count in (8, 2):  # with two samples, one replica of the last stage has none
        for one in (pipe, eager):
            one.step(x[:count], target=y[:count])
    state, wanted = pipe.full_state_dict(), eager.full_state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    pipe.close()


@pytest.mark.filterwarnings("ignore:the loss is not linear")
def test_scaled_losses_of_a_stream_are_drained() -> None:
    """A rank may learn of a minibatch, in one process, when another has learnt of the next one."""
    model, twin = models(kind=AtBothEnds)
    options: dict[str, Any] = {
        "loss_fn": F.cross_entropy, "optimizer": ADAM, "schedule": "2bw",
        "autocast": torch.float16,
    }  # fmt: skip

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2000)

    pipe = compiled(model, microbatches=4, verify="off", grad_scaler=scaler(), **options)
    eager = pdcompile.reference(twin, plan=pipe.plan, grad_scaler=scaler(), **options)
    for x, y in batches(5):
        for one in (pipe, eager):
            one.step(x, target=y)
    pipe.flush()
    assert states_equal(pipe.full_state_dict(), eager.full_state_dict()) == []
    pipe.close()


def test_a_sparse_table_that_is_also_a_dense_head() -> None:
    model, twin = models()
    options: dict[str, Any] = {
        "loss_fn": F.cross_entropy, "optimizer": partial(torch.optim.SGD, lr=0.1),
    }  # fmt: skip
    model.emb.sparse = twin.emb.sparse = True
    pipe = compiled(model, microbatches=4, **options)
    eager = pdcompile.reference(twin, plan=pipe.plan, **options)
    for x, y in batches(3):
        for one in (pipe, eager):
            one.step(x, target=y)
    assert states_equal(pipe.full_state_dict(), eager.full_state_dict()) == []
    pipe.close()


def test_bytes_of_a_tied_weight_do_not_depend_on_microbatches() -> None:
    sums = []
    for count in (2, 8):
        pipe = compiled(models()[0], loss_fn=F.cross_entropy, optimizer=ADAM, microbatches=count,
                        verify="off")  # fmt: skip
        columns = make_stream(pipe.plan).step(count)[0].columns
        sums.append([one for c in columns for one in c if one.action is Action.SEND_TIED])
        pipe.close()
    assert len(sums[0]) == len(sums[1]) == 2


def test_a_plan_without_uses_is_refused_by_the_reference() -> None:
    """One of an earlier version."""
    pipe = compiled(models()[0], loss_fn=F.cross_entropy, microbatches=2, verify="off")
    old = replace(pipe.plan, tied=(replace(pipe.plan.tied[0], uses=()),))
    with pytest.raises(ConfigError, match=r"which stage uses the tied parameter 'emb\.weight'"):
        pdcompile.reference(models()[0], loss_fn=F.cross_entropy, plan=old)
    pipe.close()
