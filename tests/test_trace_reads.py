"""Values that forward reads: validated, captured for, or refused; checked at every call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import InputError, TraceError
from pdcompile.ir.graph import CHECK, OpGraph, fingerprint
from pdcompile.ir.value_checks import check_inputs
from tests.helpers.asserting import asserted
from tests.helpers.captures import captured, faithful, make

pytestmark = pytest.mark.usefixtures("captured_anew")


def _checks(graph: OpGraph) -> list[str]:
    return [str(op.args[1]).partition(": ")[2] for op in graph.ops if op.target == CHECK]


def _raise(self: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    if labels.max() >= 8:
        raise ValueError(f"no label {labels.max().item()}")
    return self.lin(x)


def _torch_check(self: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    torch._check_tensor_all_with(ValueError, labels < 8, lambda: "labels below 8")
    return self.lin(x)


def _after_in_place(self: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    shifted = labels.new_zeros(labels.shape)
    shifted[..., 1:] = labels[..., :-1].clone()
    shifted.masked_fill_(shifted == -100, 0)
    if not torch.all(shifted < 8):
        raise ValueError("labels below 8")
    return self.lin(x) + shifted.unsqueeze(-1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("forward", [_raise, asserted, _torch_check, _after_in_place])
def test_a_validation_becomes_a_check(forward: Callable[..., Any]) -> None:
    model, x = make(forward), torch.randn(4, 3, 8)
    labels = torch.randint(0, 8, (4, 3))
    graph = faithful(model, x, labels).train
    assert len(_checks(graph)) == 1
    with pytest.raises(InputError, match="refuses this minibatch") as caught:
        graph.to_module(model)(x, torch.full((4, 3), 9))
    file = forward.__code__.co_filename.rpartition("/")[2]
    assert f"{file}:" in str(caught.value.where)


@pytest.mark.sample(2)
@pytest.mark.parametrize("calls", range(6))
def test_a_validation_that_has_been_called_before(calls: int) -> None:
    """Python makes a call in another instruction once it has made it a few times."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        good = bool(torch.isfinite(self.lin(x)).all())
        if not good:
            raise ValueError(f"not finite, of shape {tuple(x.shape)}")
        return self.lin(x)

    forward.__code__ = forward.__code__.replace()  # which no other case has run
    model, x = make(forward), torch.randn(4, 8)
    for _ in range(calls):
        model(x)
    assert len(_checks(faithful(model, x).train)) == 1


def test_float_validations_work_in_stages() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        mean, scale = self.lin(x).chunk(2, -1)
        # Said aloud: the default is a switch of the process, which some libraries turn off.
        chance = torch.distributions.Normal(mean, scale.exp(), validate_args=True)
        return -chance.log_prob(torch.ones_like(mean)).mean()

    model, x = make(forward), torch.randn(4, 8)
    assert len(_checks(faithful(model, x).train)) == 2
    pipe = pdcompile.compile(
        model, (x,), stages=2, microbatches=2, optimizer=None, costs="estimated"
    )
    pipe.step(x)
    with pytest.raises(InputError, match="refuses this minibatch"):
        pipe.step(x * float("nan"))


def _masked(self: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    h = self.lin(x)
    return h if mask.all() else h * mask.unsqueeze(-1)


def test_a_decision_on_inputs_is_captured_for_the_example_and_refused_otherwise() -> None:
    model, x, ones = make(_masked), torch.randn(4, 3, 8), torch.ones(4, 3, dtype=torch.bool)
    loss_fn = nn.MSELoss()
    with pytest.warns(UserWarning, match="decides by a value of the inputs.*it is True"):
        pipe = pdcompile.compile(
            model,
            (x, ones),
            example_target=x,
            loss_fn=loss_fn,
            stages=1,
            microbatches=2,
            optimizer=None,
            costs="estimated",
        )
    first = float(pipe.step(x, ones, target=x).loss)
    holes = ones.clone()
    holes[3, 1] = False
    with pytest.raises(InputError, match="captured for inputs") as caught:
        pipe.step(x, holes, target=x)
    assert "test_trace_reads.py:" in str(caught.value.where)
    assert float(pipe.step(x, ones, target=x).loss) == first  # nothing happened in between


def test_a_decision_that_differs_between_samples_is_refused() -> None:
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[2, 1] = False
    with pytest.raises(TraceError, match="not the same for all samples of the example"):
        captured(make(_masked), torch.randn(4, 3, 8), mask)


def test_a_small_module_that_decides_is_opaque() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, h: Tensor, mask: Tensor) -> Tensor:
            found = h.clone()
            if mask.all():
                found.mul_(self.scale)
            return found

    def forward(self: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return self.small(self.lin(x), mask)

    with pytest.warns(UserWarning, match="opaque"):
        graph = captured(
            make(forward, small=Small()), torch.randn(4, 8), torch.ones(4, 8, dtype=torch.bool)
        ).train
    assert [op.kind for op in graph.ops if op.kind == "opaque"] == ["opaque"]
    assert not _checks(graph)


def test_a_caught_exception_is_no_validation() -> None:
    class Catches(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            try:
                if labels.max() > 5:
                    raise ValueError("large")
            except ValueError:
                return x * 2
            return x

    model = make(lambda self, x, labels: self.catches(self.lin(x), labels), catches=Catches())
    labels, x = torch.tensor([1, 7, 1, 1]), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="captured as opaque: 'catches'"):
        graph = faithful(model, x, labels).train
    assert not _checks(graph)
    module = graph.to_module(model)
    for each in (labels, labels * 0):
        assert torch.equal(module(x, each), model(x, each))


def test_words_of_a_check_are_not_part_of_the_fingerprint() -> None:
    graph = captured(make(asserted), torch.randn(4, 3, 8), torch.ones(4, 3).long()).train
    (check,) = graph.checks
    moved = replace(check, args=(check.args[0], f"moved.py:1{check.args[1]}"))
    other = replace(graph, ops=tuple(moved if op is check else op for op in graph.ops))
    assert other != graph
    assert fingerprint(other) == fingerprint(graph)


def test_a_flag_that_a_result_needs_a_gradient() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = x[:, None]
        h.requires_grad = True
        return self.lin(h)

    faithful(make(forward), torch.randn(4, 8))


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=5))
def test_checks_before_a_call_hold_exactly_where_the_model_does_not_raise(
    rows: list[list[int]],
) -> None:
    graph, model = _in_place()
    labels = torch.tensor(rows)
    x = torch.randn(len(rows), 3, 8)
    before = labels.clone()
    try:
        model(x, labels)
        raised = False
    except ValueError:
        raised = True
    leaves = {"x": x, "labels": labels}
    if raised:
        with pytest.raises(InputError):
            check_inputs(graph, leaves, len(rows))
    else:
        check_inputs(graph, leaves, len(rows))
    assert torch.equal(labels, before)


@cache
def _in_place() -> tuple[OpGraph, nn.Module]:
    model = make(_after_in_place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = captured(model, torch.randn(4, 3, 8), torch.randint(0, 8, (4, 3)))
    return found.train, model


def _longest(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    longest = lengths.max().item()
    if longest > x.shape[1] or longest < 0.5:
        raise ValueError(f"{longest} of {x.shape[1]}")
    return self.lin(x) * (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)


def test_a_number_that_is_only_compared_is_captured_and_checked() -> None:
    model, x = make(_longest), torch.randn(4, 3, 8)
    with pytest.warns(UserWarning, match="it is 2 in the example"):
        graph = faithful(model, x, torch.full((4,), 2)).train
    module = graph.to_module(model)
    assert torch.equal(module(x, torch.tensor([2, 2, 1, 1])), model(x, torch.tensor([2, 2, 1, 1])))
    with pytest.raises(InputError, match="this value is 2"):
        module(x, torch.full((4,), 3))
    with pytest.raises(TraceError, match="not the same for all samples of the example"):
        captured(model, x, torch.tensor([1, 3, 2, 1]))


def test_a_number_of_the_inputs_is_captured_and_checked() -> None:
    def forward(self: nn.Module, x: Tensor, steps: Tensor) -> Tensor:
        for _ in range(steps.max().item()):
            x = self.lin(x)
        return x

    model, x, twice = make(forward), torch.randn(4, 8), torch.full((4,), 2)
    with pytest.warns(UserWarning, match="it is 2 in the example"):
        graph = faithful(model, x, twice).train
    assert [op.target for op in graph.ops].count("torch.nn.Linear") == 2
    with pytest.raises(InputError, match="this value is 2"):
        graph.to_module(model)(x, twice + 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "use",
    [
        lambda x, number: x * number,
        lambda x, number: x[:, : int(number)],
        lambda x, number: torch.full((1,), number),
        lambda x, number: x.new_tensor([number]),
        lambda x, number: x + float(f"{number}"),
    ],
    ids=["times", "slice", "full", "list", "text"],
)
def test_a_number_of_activations_stays_refused(use: Callable[[Tensor, Any], Tensor]) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.lin(x)
        return h.sum() + use(h, h.abs().max().item()).sum()

    with pytest.raises(TraceError, match="reads the value of a tensor"):
        captured(make(forward))


def _counts_up_to(self: nn.Module, x: Tensor) -> Tensor:
    if self.training and self.steps < 3:
        self.steps += 1
    return self.lin(x)


def test_a_branch_that_counts_is_refused_before_anything_runs() -> None:
    with pytest.raises(TraceError, match="reads the value of a tensor"):
        captured(make(_counts_up_to, steps=torch.zeros((), dtype=torch.long)))


class _Settings:
    early = late = 1.0


def _reads_its_settings(self: nn.Module, x: Tensor) -> Tensor:
    y = self.lin(x) * self.settings.early
    if (x > 9).any():  # nobody knows yet what comes of it
        raise ValueError("too large")
    return y * self.settings.late


def test_what_is_read_after_an_assumption_failed_counts() -> None:
    model = make(_reads_its_settings)
    model.settings = _Settings()
    places = captured(model).attributes
    assert {("", "settings", "early"), ("", "settings", "late")} <= set(places)


def test_a_constant_mask_is_read_at_every_size() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 1200, dtype=torch.bool)
        return self.lin(x) if mask.all() else self.lin(x) * mask[:, :8]

    graph = faithful(make(forward)).train
    assert [op.target for op in graph.ops] == ["torch.nn.Linear"]
    assert graph.sizes.largest == 120
