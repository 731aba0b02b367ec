"""Models that are another computation at every batch size: captured for the one that runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, InputError, TraceError
from pdcompile.passes.trace import attempt
from pdcompile.passes.trace.refusals import Ended
from tests.helpers.captures import captured, faithful, make, rows
from tests.helpers.pipelines import states_equal

pytestmark = pytest.mark.usefixtures("captured_anew")

Forward = Callable[..., Any]


def _rows_in_a_loop(self: nn.Module, x: Tensor) -> Tensor:
    return self.second(torch.stack([self.lin(row) * i for i, row in enumerate(x)]))


def _in_reverse(self: nn.Module, x: Tensor) -> Tensor:
    return self.second(torch.stack(list(self.lin(x))[::-1]))


def _twice(self: nn.Module, x: Tensor) -> Tensor:
    parts = list(self.lin(x))
    return self.second(torch.stack([*parts, parts[0]])[1:])


def _batch_as_float(self: nn.Module, x: Tensor) -> Tensor:
    return self.second(self.lin(x) + x.shape[0] * 0.5)


def _batch_squared(self: nn.Module, x: Tensor) -> Tensor:
    return self.second(self.lin(x) * torch.ones(x.shape[0] ** 2).sum())


FORWARDS = [_rows_in_a_loop, _in_reverse, _twice, _batch_as_float, _batch_squared]


@pytest.mark.sample(1)
@pytest.mark.parametrize("forward", FORWARDS)
def test_it_is_the_model_at_this_size(forward: Forward) -> None:
    model = make(forward, second=nn.Linear(8, 8))
    with pytest.warns(
        UserWarning,
        match=r"of 4 samples, and .* are refused: .*test_trace_one_size.py:\d+",
    ):
        found = faithful(model, sizes=(4,))
    for graph in (found.train, found.eval):
        assert (graph.sizes.smallest, graph.sizes.largest) == (4, 4)
        assert not any(op.opaque for op in graph.ops)


def _single_row_first(self: nn.Module, x: Tensor) -> Tensor:
    x = x.flatten() if len(x) == 1 else x.relu()
    return self.second(self.lin(x).sigmoid()).reshape(-1, 8)


def test_a_recording_at_another_size_ends_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = list[int]()
    plain = attempt.record

    def record(*args: Any, **how: Any) -> Any:
        try:
            return plain(*args, **how)
        except Ended as ended:
            lengths.append(len(ended.args[0]))
            raise

    monkeypatch.setattr(attempt, "record", record)
    with pytest.warns(UserWarning, match="other operators for other batch sizes: flatten .* relu"):
        found = captured(make(_single_row_first, second=nn.Linear(8, 8)), rows(1))
    assert found.train.sizes.is_one
    assert lengths == [1] * 3  # at 60 and 2 in training, at 60 in evaluation


def test_training_is_that_of_the_reference_and_short_minibatches_are_refused() -> None:
    model = make(_rows_in_a_loop, second=nn.Linear(8, 8))
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "microbatches": 2, "seed": 3}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    eager = pdcompile.reference(model, optimizer=optimizer, keep_model=True, **options)
    with pytest.warns(UserWarning, match="of 4 samples"):
        pipe = pdcompile.compile(
            model, (rows(8),), example_target=rows(8, seed=9), stages=2, keep_model=True,
            costs="estimated", optimizer=optimizer, **options,
        )  # fmt: skip
    for step in range(2):
        x, target = rows(8, seed=step), rows(8, seed=step + 9)
        ours, theirs = pipe.step(x, target=target), eager.step(x, target=target)
        assert float(ours.loss) == float(theirs.loss)
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())
    with pytest.raises(InputError, match=r"one of 3, .* right for 4 alone: forward runs") as caught:
        pipe.step(rows(6), target=rows(6))
    assert caught.value.remedy == "minibatches of 8 samples"
    pipe.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [12, 4, 8, 20])
def test_evaluations_of_other_sizes_are_cut_into_microbatches_of_this_one(count: int) -> None:
    model = make(_rows_in_a_loop, second=nn.Linear(8, 8))
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "optimizer": None, "keep_model": True}
    eager = pdcompile.reference(model, microbatches=count // 4, **options)
    with pytest.warns(UserWarning, match="of 4 samples"):
        pipe = pdcompile.compile(
            model, (rows(8),), example_target=rows(8), stages=2, costs="estimated", microbatches=2,
            **options,
        )  # fmt: skip
    x, target = rows(count, seed=1), rows(count, seed=2)
    assert torch.equal(pipe.predict(x), eager.predict(x))
    ours, theirs = pipe.eval_step(x, target=target), eager.eval_step(x, target=target)
    assert float(ours.loss) == float(theirs.loss)
    assert torch.equal(ours.outputs, theirs.outputs)
    (shard,) = pipe.shard(
        torch.utils.data.TensorDataset(x, target), [[*range(count)]], evaluation=True
    )
    assert torch.equal(pipe.predict(shard), eager.predict(x))
    with pytest.raises(InputError, match="right for 4 alone") as caught:
        pipe.predict(rows(count + 1))
    assert "4 samples or a multiple of it" in (caught.value.remedy or "")
    pipe.close()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor, state: Any) -> Any:
        return self.rnn(x, state)


def _call(count: int, seed: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    x, h, c = (
        torch.randn(*shape, generator=draw) for shape in ((count, 3, 8), *[(2, count, 8)] * 2)
    )
    return x, (h, c)


def _same(found: Any, expected: Any) -> bool:
    flat = [torch.utils._pytree.tree_flatten(part) for part in (found, expected)]
    return flat[0][1] == flat[1][1] and all(map(torch.equal, flat[0][0], flat[1][0]))


def test_without_batch_dims_a_graph_is_for_these_shapes() -> None:
    model = _Recurrent()
    graph = pdcompile.trace(model, _call(4), batch_dims=None)
    assert all(entry.batch_dim is None for entry in graph.inputs)
    module = graph.to_module()
    assert _same(module(*_call(4, seed=1)), model(*_call(4, seed=1)))
    with pytest.raises(InputError, match=r"float32 \(5, 3, 8\), captured was float32 \(4, 3, 8\)"):
        module(*_call(5))


def test_batch_dims_say_where_the_samples_are() -> None:
    model = _Recurrent()
    with pytest.raises(InputError, match="neither the batch size"):
        pdcompile.trace(model, _call(4))
    with pytest.raises(ConfigError, match="not a valid value"):
        pdcompile.trace(model, _call(4), batch_dims="first")
    module = pdcompile.trace(model, _call(4), batch_dims={"state": 1}).to_module()
    for count in (1, 4, 7):
        assert _same(module(*_call(count)), model(*_call(count)))


def _with_a_table(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) + self.table


def test_a_model_that_runs_with_its_own_size_alone() -> None:
    model = make(_with_a_table, table=rows(seed=5))
    with pytest.warns(
        UserWarning,
        match=r"of 4 samples, .* are refused: with 2 samples the model's forward raised",
    ):
        graph = pdcompile.trace(model, rows())
    assert (graph.sizes.smallest, graph.sizes.largest) == (4, 4)
    module = graph.to_module()
    assert torch.equal(module(rows(seed=1)), model(rows(seed=1)))
    with pytest.raises(InputError, match=r"for 4 samples, got 3"):
        module(rows(3))
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "costs": "estimated", "stages": 2}
    with pytest.warns(UserWarning, match="of 4 samples"):
        pipe = pdcompile.compile(
            model, rows(8), example_target=rows(8), microbatches=2, keep_model=True, **options
        )
    pipe.close()


def test_a_microbatch_that_the_model_does_not_take() -> None:
    model = make(_with_a_table, table=rows(seed=5))
    with pytest.raises(
        TraceError, match=r"with the 2 samples of a microbatch .* 4 it does not"
    ) as e:
        captured(model, microbatch_size=2)
    assert str(e.value.remedy).startswith("microbatches=1")
    assert "batch_dims={'x': None}" in str(e.value.remedy)
    with pytest.raises(TraceError, match=r"^the model's forward raised"):
        captured(model, rows(6), microbatch_size=3)


class _Positions(nn.Module):
    """Takes positions of three kinds for each sample, (3, samples, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * (positions[0] + positions[1] + positions[2])
        return out


class _Graph(nn.Module):
    """Mixes as many nodes as there are samples, twice, by one matrix for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = edges @ (edges @ self.layer(x))
        return out.mean(1)


def test_of_several_inputs_that_may_not_count_samples_all_are_named() -> None:
    """The remedy's example is the last of them, which is no target: models begin with samples."""
    given, target = (torch.randn(8, 8, 8), torch.randn(8, 8)), torch.randn(8, 8)
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "costs": "estimated", "microbatches": 2}
    with pytest.raises(TraceError) as e:
        pdcompile.compile(_Graph(), given, example_target=target, **options)
    assert str(e.value.remedy).startswith(
        "where dimension 0 of x (8, 8, 8) or of edges (8, 8) does not count samples, say so: "
        "batch_dims={'edges': None}; or"
    )
    pipe = pdcompile.compile(_Graph(), batch_dims={"edges": None}, optimizer=None, **options)
    assert pipe.step(*given, target=target).loss is not None
    pipe.close()


def test_as_many_kinds_as_samples_are_not_samples() -> None:
    """An input's first dimension has the minibatch's size by chance; batch_dims is the remedy."""
    given, target = (torch.randn(3, 8), torch.randn(3, 3, 8)), torch.randn(3, 8)
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "costs": "estimated", "microbatches": 3}
    with pytest.raises(TraceError, match="raised IndexError") as e:
        pdcompile.compile(_Positions(), given, example_target=target, **options)
    remedy = "batch_dims={'positions': 1}"
    assert f"where dimension 0 of positions (3, 3, 8) does not count samples, say so: {remedy}" in (
        str(e.value.remedy)
    )
    model = _Positions()
    pipe = pdcompile.compile(model, batch_dims={"positions": 1}, optimizer=None, **options)
    loss = nn.functional.mse_loss(model(*given), target)
    torch.testing.assert_close(pipe.step(*given, target=target).loss.wait(), loss.detach())
    pipe.close()


class _Loop(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.back = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.back(self.inner(row)) for row in x])


def test_a_small_module_is_rather_opaque() -> None:
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8), _Loop(8))
    with pytest.warns(UserWarning, match="captured as opaque: '2'"):
        found = faithful(model)
    assert found.train.sizes.smallest == 1
    assert [op.opaque for op in found.train.ops] == [False, False, True]


def test_a_large_module_is_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Loop(512), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="of 4 samples"):
        found = captured(model)
    assert not any(op.opaque for op in found.train.ops)


def test_a_layer_that_lays_out_one_sample_otherwise_has_its_size_with_the_way_out() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    model, x = Attends(), torch.randn(4, 5, 16)
    given = {"loss_fn": nn.functional.mse_loss, "example_target": x, "costs": "estimated"}
    with pytest.warns(UserWarning, match="of one sample, .* fewer, larger microbatches"):
        pdcompile.compile(model, x, microbatches=4, **given).close()
    pipe = pdcompile.compile(model, x, microbatches=2, **given)
    assert pipe.step(x[:3], target=x[:3]).loss > 0
    pipe.close()


class QuadraticInEvaluation(nn.Module):
    """Linear in the number of samples in training, and not in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.other(self.one(x))
        return y if self.training else y * x.shape[0] ** 2


def test_two_sizes_alone_are_no_proof_of_a_line() -> None:
    """Every number at two sizes lies on a line, so evaluation is tried at a third one."""
    with pytest.warns(UserWarning, match="every microbatch has to be of 8 samples"):
        module = pdcompile.trace(QuadraticInEvaluation(), (torch.randn(8, 8),)).to_module()
    module.eval()
    with pytest.raises(pdcompile.PdcompileError):
        module(torch.randn(12, 8))
