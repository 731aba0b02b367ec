"""Sizes that depend on integer inputs where the rest needs to know them: the example's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import InputError, TraceError
from tests.helpers.captures import captured, faithful, make

END = 9
X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor(
    [[1, 2, 3, END, 0, 0], [4, END, 0, 0, 0, 0], [5, 6, 7, 8, 8, END], [END, 0, 0, 0, 0, 0]]
)


def _last_end(self: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    mask = ids.eq(END)
    if len(torch.unique_consecutive(mask.sum(1))) > 1:
        raise ValueError("all samples need the same number of ends")
    ends = self.lin(x)[mask, :].view(len(x), -1, x.shape[-1])
    return self.lin(ends[:, -1])


def _by_nonzero(self: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    row, column = ids.eq(END).nonzero(as_tuple=True)
    assert row.numel() == len(x)
    return self.lin(x[torch.arange(len(x)), column.view(len(x))])


def _by_select(self: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return self.lin(x.masked_select(ids.eq(END).unsqueeze(-1)).view(len(x), 8))


def _by_repeats(self: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    counts = ids.eq(END).sum(1) + 1
    return self.lin(x).repeat_interleave(counts, 0).view(len(x), 2, 6, 8)


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return out.square().mean() * target.square().mean()


FORWARDS = [_last_end, _by_nonzero, _by_select, _by_repeats]


@pytest.mark.parametrize("forward", FORWARDS)
def test_sizes_of_the_example_are_captured(forward: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match="a size depends on values of the inputs"):
        faithful(make(forward), X, IDS, sizes=(1, 4))


@pytest.mark.sample(1)
@pytest.mark.parametrize("forward", FORWARDS)
def test_minibatches_in_which_they_differ_are_refused_before_anything_runs(
    forward: Callable[..., Any],
) -> None:
    model = make(forward)
    with pytest.warns(UserWarning, match="a size depends"):
        pipe = pdcompile.compile(
            model, (X, IDS), loss_fn=_loss, example_target=X, stages=2, microbatches=2,
            optimizer=None, costs="estimated",
        )  # fmt: skip
    reference = pdcompile.reference(model, loss_fn=_loss, microbatches=2, optimizer=None)
    ids = IDS.flip(0)
    assert float(pipe.step(X, ids, target=X).loss) == float(reference.step(X, ids, target=X).loss)
    other = IDS.clone()
    other[3, 3] = END
    with pytest.raises(InputError, match="is that of the example") as refused:
        pipe.step(X, other, target=X)
    assert "test_trace_example_sizes.py" in str(refused.value)


def test_sizes_that_differ_between_the_samples_of_the_example_are_refused() -> None:
    other = IDS.clone()
    other[0] = END
    with pytest.raises(TraceError, match="not the same for all samples of the example"):
        captured(make(_by_select), X, other)


def test_a_size_that_depends_on_activations_is_refused() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.lin(x)[x[..., 0] > 0].view(len(x), -1, 8)

    with pytest.raises(TraceError, match="depends on values"):
        captured(make(forward), X)


def test_what_can_do_without_a_size_keeps_it_open() -> None:
    def forward(self: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        return self.lin(x)[ids.eq(END)].square().mean()

    graph = faithful(make(forward), X, IDS).train
    assert any(value.varies for value in graph.values.values())


def _real_rows(self: nn.Module, x: Tensor) -> Tensor:
    """Leaves out what is padding, and tells the samples apart again."""
    real = (x == 0).sum(-1) != x.shape[-1]
    chosen = self.lin(x.flatten(0, 1)[real.flatten()])
    return torch.stack([part.mean(0) for part in chosen.split(real.sum(1).tolist())])


@pytest.mark.slow
def test_sizes_that_depend_on_floats_of_the_inputs() -> None:
    with pytest.warns(UserWarning, match="a size depends on values of the inputs"):
        faithful(make(_real_rows), X, sizes=(4,))
    pipe = pdcompile.compile(
        make(_real_rows), (X,), loss_fn=_loss, example_target=X, stages=2, microbatches=2,
        optimizer=None, costs="estimated",
    )  # fmt: skip
    pipe.step(X, target=X)
    padded = X.clone()
    padded[1, 4] = 0
    with pytest.raises(InputError, match="this number of rows is that of the example"):
        pipe.step(padded, target=X)


def test_numbers_in_lists_and_slices_are_those_of_the_example() -> None:
    def forward(self: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
        h = self.lin(x)[:, : counts.max().item()]
        parts = h.flatten(0, 1).split(counts.tolist())
        return torch.stack([part.mean(0) for part in parts])

    faithful(make(forward), X, torch.full((4,), 5), sizes=(4,))
    with pytest.raises(TraceError, match=r"\(item\); it is not the same for all .* example\n"):
        captured(make(forward), X, torch.tensor([5, 4, 5, 4]))


def test_an_output_whose_shape_depends_on_values_is_refused_with_its_line() -> None:
    def forward(self: nn.Module, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(x).sum(), ids[ids > 0]

    with pytest.raises(TraceError, match="the model's output depends on values") as caught:
        captured(make(forward), X, IDS)
    assert "test_trace_example_sizes.py" in str(caught.value.where)
    same = torch.tensor([[1, 2, 0, 0, 0, 0]] * 4)
    with pytest.warns(UserWarning, match=r"a size depends .*test_trace_example_sizes\.py"):
        graph = faithful(make(forward), X, same).train
    assert any("torch._assert" in op.target for op in graph.ops)
