"""Values whose shape depends on values, inside of a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import TraceError
from pdcompile.passes.trace.tape import run
from tests.helpers.captures import captured, faithful, make

pytestmark = pytest.mark.usefixtures("captured_anew")

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
    assert [value.varies for value in ragged] == [(0,)]


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


def test_a_list_of_parts_that_are_used_one_by_one_too() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        parts = x.unbind(1)
        return torch.stack(parts, 1) * self.lin(parts[2]).unsqueeze(1)

    faithful(make(forward), X)


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
