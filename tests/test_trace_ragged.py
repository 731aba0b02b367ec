"""Values whose shape depends on values, inside of a stage, and lists of all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import TraceError
from pdcompile.ir.graph import Ref
from pdcompile.passes.trace.tape import run
from tests.helpers.captures import captured, faithful, make

X = torch.randn(4, 9, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, -1], [3, -1, -1], [4, 5, 6], [7, 7, -1]])


def _speech(self: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -1
    logs = self.lin(x).log_softmax(-1).transpose(0, 1)
    frames = torch.ones_like(x[..., 0], dtype=torch.long).sum(-1)
    return F.ctc_loss(logs, labels.masked_select(mask), frames, mask.sum(-1))


def test_labels_behind_a_mask_reach_the_loss() -> None:
    graph = faithful(make(_speech), X, LABELS, sizes=(1, 4)).train
    ragged = [value for value in graph.values.values() if value.name.startswith("masked_select")]
    assert [value.is_tensor for value in ragged] == [False]


def test_labels_behind_a_mask_in_a_pipeline_of_other_lengths() -> None:
    model = make(_speech)
    pipe = pdcompile.compile(
        model, (X, LABELS), stages=2, microbatches=2, optimizer=None, costs="estimated"
    )
    reference = pdcompile.reference(model, microbatches=2, optimizer=None)
    shorter = LABELS.clone()
    shorter[:, 1:] = -1
    for labels in (LABELS, shorter):
        assert float(pipe.step(X, labels).loss) == float(reference.step(X, labels).loss)


def test_lengths_of_long_sounds_are_known_at_all_sizes_that_are_recorded() -> None:
    def forward(self: nn.Module, sounds: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 8:
            raise ValueError("no such label")
        mask = labels != -1
        logs = self.lin(sounds.unflatten(1, (-1, 8))).log_softmax(-1).transpose(0, 1)
        frames = torch.ones_like(sounds, dtype=torch.long).sum(-1) // 8
        return F.ctc_loss(logs, labels.masked_select(mask), frames, mask.sum(-1))

    sounds = torch.randn(4, 1200, generator=torch.Generator().manual_seed(0))
    graph = faithful(make(forward), sounds, LABELS, sizes=(1, 4)).train
    assert graph.sizes.largest >= 60
    assert [op.target for op in graph.ops].count("torch._assert") == 1


@pytest.mark.parametrize(
    "look",
    [
        lambda chosen: chosen.shape[0],
        lambda chosen: chosen.numel(),
        len,
        list,
    ],
    ids=["shape", "numel", "len", "list"],
)
def test_nobody_may_look_at_such_a_shape(look: Callable[[Tensor], Any]) -> None:
    def forward(self: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        found = look(labels[labels > 0])
        return self.lin(x) * (found.sum() if isinstance(found, Tensor) else float(len(str(found))))

    with pytest.raises(TraceError, match=r"depends on values"):
        captured(make(forward), X, LABELS)


def test_a_list_of_all_samples_is_one_value_at_every_batch_size() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.lin(torch.cat(list(self.lin(x)), dim=0))

    graph = faithful(make(forward), X).train
    (cat,) = [op for op in graph.ops if op.target == "torch.cat"]
    assert cat.args[0] == Ref("unbind")


def test_a_list_of_parts_that_are_used_one_by_one_too() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        parts = x.unbind(1)
        return torch.stack(parts, 1) * self.lin(parts[2]).unsqueeze(1)

    faithful(make(forward), X)


class _Experts(nn.ModuleDict):
    """Goes through the experts that are hit, as models of Hugging Face do."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        for i in range(4):
            self[f"expert_{i}"] = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, h: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for n, expert in enumerate(hit.flatten().tolist() if self.form == "list" else hit):
            number = expert if self.form == "list" else expert[0]
            slot, row = torch.where(mask[expert].reshape(mask.shape[1:]))
            y = self[f"expert_{number}"](h[row]) * weights[row, slot, None]
            if self.form == "counted":
                y = y * n
            elif self.form == "dense":
                out += self[f"expert_{number}"](h)
            out.index_add_(0, row, y)
        return out / len(hit) if self.form == "asked" else out


def _routed(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    weights, experts = self.router(h).softmax(-1).topk(2, -1)
    return self.lin(self.experts(h, F.one_hot(experts, 4).permute(2, 1, 0), weights) + h)


def _mixture(form: str) -> nn.Module:
    return make(_routed, experts=_Experts(form), router=nn.Linear(8, 4))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tensors", pytest.param("list", marks=pytest.mark.slow)])
def test_a_loop_through_the_experts_that_are_hit(form: str) -> None:
    model = _mixture(form)
    graph = faithful(model, X[:, 0], sizes=(4,)).train
    assert not any(op.opaque for op in graph.ops)
    module = graph.to_module(model)
    hit = set()
    for x in (X[:, 0], X[:1, 1], X[:, 2] * 3):
        found = []
        for runs in (model, module):
            torch.manual_seed(2)
            runs(x).square().sum().backward()
            grads = {name: p.grad for name, p in model.named_parameters()}
            model.zero_grad(set_to_none=True)
            found.append(grads)
        for name, grad in found[0].items():
            other = found[1][name]
            assert grad is other is None or torch.equal(grad, other)
        hit.add(tuple(name for name, grad in found[0].items() if grad is not None))
    assert len(hit) > 1  # not always the same experts


@pytest.mark.parametrize(
    "form",
    [
        "counted",
        pytest.param("dense", marks=pytest.mark.slow),
        pytest.param("asked", marks=pytest.mark.slow),
    ],
)
def test_a_loop_on_which_more_hangs_stays_whole(form: str) -> None:
    with pytest.warns(UserWarning, match="captured as opaque: 'experts'"):
        faithful(_mixture(form), X[:, 0], sizes=(4,))


def test_made_up_sizes_take_few_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        self.seen = x.dtype  # so that calls in other orders are recorded too
        y = self.lin(x)
        return y + y[x > 0].sum()

    recordings = []
    plain = run._Run.recording

    def counted(self: Any, *given: Any) -> Any:
        recordings.append(self)
        return plain(self, *given)

    monkeypatch.setattr(run._Run, "recording", counted)
    captured(make(forward, seen=None))
    assert len(recordings) <= 22


def test_a_limit_that_only_many_samples_reach_ends_the_range_of_sizes() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = self.lin(x)
        chosen = y[x > 0]
        if chosen.shape[0] > 300:  # of 8 for each sample
            chosen = chosen * 2
        return y + chosen.sum()

    sizes = captured(make(forward)).train.sizes
    assert (sizes.smallest, sizes.largest) == (1, 17)
    assert "depends on values" in sizes.above
