"""Conversions hold plain PyTorch's values and gradients, in turns and on ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pdcompile.parts import conversions
from pdcompile.parts.conversions import (
    Alone,
    gather,
    here,
    own,
    scatter,
    spread,
    swap,
    total,
    using,
)
from pdcompile.parts.turns import UnequalParts, in_turns
from tests.helpers.launch import processes
from tests.helpers.parts import FORMS, PARTS, check, train


@pytest.mark.parametrize("form", FORMS)
def test_two_parts_of_one_process_train_as_plain_pytorch(form: str) -> None:
    def of(part: int) -> Callable[[], Any]:
        return lambda: train(form, part)

    found = in_turns([of(part) for part in range(PARTS)])
    check(form, found)
    again = in_turns([of(part) for part in range(PARTS)])
    for (one, gradients), (other, others) in zip(found, again, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


RANKS = """
    import torch, torch.distributed as dist
    from pdcompile.parts.conversions import Group, gather, here, own, scatter, swap, total, using
    from tests.helpers.parts import FORMS, check, train

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with using(Group()):
        assert (here().part, here().count) == (rank, 2)
        for form in FORMS:
            found = [None, None]
            dist.all_gather_object(found, train(form, rank))
            check(form, found)
        # every dtype moves, and what can be added is
        for dtype in (torch.bool, torch.int16, torch.int64, torch.float16, torch.bfloat16,
                      torch.float32, torch.complex64):
            whole = torch.arange(24).reshape(2, 12).to(dtype)
            assert torch.equal(gather(own(whole, 1, runs=3), 1, runs=3), whole), dtype
            rows = swap(own(whole, 1), 1, 0)
            assert torch.equal(rows, whole[rank : rank + 1]), dtype
            if dtype not in (torch.bool, torch.int16):
                assert torch.equal(total(whole), whole + whole), dtype
                assert torch.equal(scatter(whole, 0), (whole + whole)[rank : rank + 1]), dtype
        empty = torch.zeros(0, 4, requires_grad=True)
        (gather(own(empty, 1), 1) + total(empty)).sum().backward()
        assert empty.grad.shape == (0, 4)
    print(f"rank {rank} agrees")
    dist.destroy_process_group()
"""


def test_two_ranks_train_as_plain_pytorch(tmp_path: Path) -> None:
    run = processes(RANKS, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("agrees") == 2


# Each conversion alone: the linear map that it is for all parts together, and its transpose.


@given(st.data())
def test_backward_is_the_transpose_of_forward(data: Any) -> None:
    """All that parts put in and get out is one linear map: <out, A in> = <A^T out, in>.

    Gradients have their own layouts: one of a whole value counts once, and one that is summed as
    often as there are parts.
    """
    count = data.draw(st.sampled_from([1, 2, 3]))
    runs, dim, other = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1)), 2
    share = data.draw(st.integers(1, 2)) * runs
    shape = [2, 2, count]
    whole = [n * (share * count if d == dim else 1) for d, n in enumerate(shape)]
    local = [n * (share if d == dim else 1) for d, n in enumerate(shape)]
    cases: dict[str, tuple[Callable[[Tensor], Tensor], list[int], str, str]] = {
        "spread": (spread, whole, "I", "R"),
        "total": (total, whole, "P", "I"),
        "gather": (lambda x: gather(x, dim, runs=runs), local, "S", "I"),
        "gathered and spread": (
            lambda x: gather(x, dim - 3, runs=runs, spread=True), local, "S", "R",
        ),
        "own": (lambda x: own(x, dim, runs=runs), whole, "I", "S"),
        "scatter": (lambda x: scatter(x, dim, runs=runs), whole, "P", "S"),
        "swap": (lambda x: swap(x, dim, other, old_runs=runs), local, "S", "S"),
    }  # fmt: skip
    function, given_shape, old, new = cases[data.draw(st.sampled_from(sorted(cases)))]
    generator = torch.Generator().manual_seed(0)
    same = torch.randn(given_shape, dtype=torch.float64, generator=generator)
    sums = [
        torch.randn(given_shape, dtype=torch.float64, generator=generator) for _ in range(count)
    ]
    ins = [same if old == "I" else one for one in sums]
    outs: list[Tensor] = []

    def run(part: int) -> tuple[Tensor, Tensor, Tensor]:
        x = ins[part].clone().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        y = function(x)
        seed = torch.Generator().manual_seed(7 if new == "I" else part)
        gradient = torch.randn(y.shape, dtype=y.dtype, generator=seed)
        y.backward(gradient)
        assert x.grad is not None
        return y.detach(), gradient, x.grad

    found = in_turns([lambda part=part: run(part) for part in range(count)])
    outs = [(y * gradient).sum() for y, gradient, _ in found]
    back = [(x * gradient).sum() for x, (_, _, gradient) in zip(ins, found, strict=True)]
    left = outs[0] if new == "I" else sum(outs)
    right = back[0] if old == "I" else sum(back)
    torch.testing.assert_close(left, right)
    if new in "IR":
        assert all(torch.equal(y, found[0][0]) for y, _, _ in found)
    if old == "I":
        assert all(torch.equal(gradient, found[0][2]) for _, _, gradient in found)


def test_gathered_runs_are_the_dimension_in_its_own_order() -> None:
    whole = torch.arange(24).reshape(2, 12)
    shares = in_turns([lambda: own(whole, 1, runs=3)] * 2)
    assert shares[1][0].tolist() == [2, 3, 6, 7, 10, 11]
    found = in_turns([lambda part=part: gather(shares[part], -1, runs=3) for part in range(2)])
    assert all(torch.equal(one, whole) for one in found)


def test_runs_of_one_dimension_are_cut_anew() -> None:
    """Split in halves, and then in the halves of each of two runs; and back in backward."""
    x = torch.arange(8.0, requires_grad=True)

    def run() -> tuple[list[float], list[float]]:
        own_half = own(x, 0).detach().requires_grad_()
        found = swap(own_half, 0, 0, new_runs=2)
        (found * found.detach()).sum().backward()
        assert own_half.grad is not None
        return found.tolist(), own_half.grad.tolist()

    first, second = in_turns([run, run])
    assert (first[0], second[0]) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert (first[1], second[1]) == ([0, 1, 2, 3], [4, 5, 6, 7])


def test_a_second_derivative_goes_through_conversions() -> None:
    def run() -> Tensor:
        x = torch.linspace(1, 2, 4, dtype=torch.float64).requires_grad_()
        y = total(own(x, 0) ** 3)  # each part two of the four
        (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.sum(), x)
        return found

    x = torch.linspace(1, 2, 4, dtype=torch.float64).requires_grad_()
    y = x[:2] ** 3 + x[2:] ** 3
    (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), x)
    for one in in_turns([run, run]):
        torch.testing.assert_close(one, expected)


# Inputs of every kind.


def test_nothing_is_recorded_without_gradients() -> None:
    def run() -> list[Any]:
        x = torch.ones(4, 4, requires_grad=True)
        with torch.no_grad():
            assert spread(x) is x
            without = [total(x), gather(x, 0), own(x, 1), scatter(x, 0), swap(x, 0, 1)]
        integers = [spread(torch.arange(4)), gather(torch.arange(4), 0), own(torch.arange(4), 0)]
        with torch.inference_mode():
            total(torch.ones(2))
        return [*without, *integers]

    assert not any(one.requires_grad for one in in_turns([run, run])[0])


def test_parts_take_over_the_callers_grad_mode() -> None:
    with torch.no_grad():
        assert in_turns([torch.is_grad_enabled] * 2) == [False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_have_the_dtype_of_what_came_in(dtype: torch.dtype) -> None:
    def run() -> tuple[Tensor, Tensor]:
        x = torch.ones(2, 4, dtype=dtype, requires_grad=True)
        y = total(own(spread(x), 1))
        y.float().sum().backward()
        assert x.grad is not None
        return y, x.grad

    for y, gradient in in_turns([run, run]):
        assert y.dtype == gradient.dtype == dtype


def test_empty_values() -> None:
    def run() -> Tensor:
        x = torch.zeros(0, 4, requires_grad=True)
        (gather(own(x, 1), 1) + total(spread(x)) + swap(swap(x, 1, 0), 0, 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    assert [tuple(one.shape) for one in in_turns([run, run])] == [(0, 4)] * 2


def test_a_part_may_write_into_what_it_gave_and_got() -> None:
    def run() -> tuple[Tensor, Tensor]:
        x = torch.ones(3)
        first = total(x)
        x.zero_()
        first.add_(here().part)
        return first, gather(x, 0)

    (one, _), (other, _) = in_turns([run, run])
    assert one.tolist() == [2, 2, 2]
    assert other.tolist() == [3, 3, 3]


def test_shapes_alone_go_through_on_fake_tensors_and_meta() -> None:
    def run(device: str) -> list[tuple[int, ...]]:
        x = torch.empty(4, 6, device=device, requires_grad=True)
        found = [
            spread(x), total(x), gather(x, 0), own(x, 1), scatter(x, 1), swap(x, 1, 0),
            gather(x, 1, runs=3, spread=True),
        ]  # fmt: skip
        sum(one.sum() for one in found).backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        return [tuple(one.shape) for one in found]

    expected = [(4, 6), (4, 6), (8, 6), (4, 3), (4, 3), (2, 12), (4, 12)]
    with using(Alone(2)):
        assert run("meta") == run("cpu") == expected
        with FakeTensorMode():
            assert run("cpu") == expected


# Turns.


def test_each_part_draws_as_if_it_were_alone() -> None:
    def run() -> Tensor:
        first = torch.rand(2)
        total(first)
        return torch.cat([first, torch.rand(2)])

    torch.manual_seed(3)
    expected, after = torch.rand(4), torch.rand(1)
    torch.manual_seed(3)
    assert all(torch.equal(one, expected) for one in in_turns([run, run]))
    assert torch.equal(torch.rand(1), after)


def test_one_runs_at_a_time_always_in_the_same_order() -> None:
    seen: list[tuple[int, int]] = []

    def run() -> None:
        for k in range(3):
            seen.append((here().part, k))
            total(torch.ones(1))
            seen.append((here().part, k))

    in_turns([run] * 3)
    rounds = [(part, k) for k in range(3) for part in range(3)]
    expected = [(part, 0) for part in range(3)]
    for k in range(3):
        for part in range(3):
            expected.append((part, k))
            if k < 2:
                expected.append((part, k + 1))
    assert seen == expected
    assert len(seen) == 2 * len(rounds)


def threads() -> int:
    return sum(one.name.startswith("pdcompile part") for one in threading.enumerate())


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_error_of_one_part_ends_all(failing: int) -> None:
    done: list[int] = []

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        y = total(x)
        if here().part == failing:
            raise KeyError("why")
        spread(y).sum().backward()
        done.append(here().part)

    with pytest.raises(KeyError, match="why"):
        in_turns([run] * 3)
    assert not done
    assert threads() == 0


def test_an_error_in_backward_ends_all() -> None:
    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        y = spread(x * 1)
        if here().part == 1:
            y.register_hook(lambda gradient: 1 / 0)  # type: ignore[no-untyped-call]
        y.sum().backward()

    with pytest.raises(ZeroDivisionError):
        in_turns([run] * 2)
    assert threads() == 0


def test_unequal_conversions_are_an_error_that_names_both() -> None:
    def run() -> None:
        x = torch.ones(4, requires_grad=True)
        if here().part == 1:
            gather(x, 0)
        total(x)

    message = (
        r"part 0 is at total \(.*test_conversions.py:\d+\) .* and part 1 is at gather \(.*:\d+"
    )
    with pytest.raises(UnequalParts, match=message):
        in_turns([run] * 2)
    assert threads() == 0


def test_a_part_that_ends_early_is_an_error() -> None:
    def run() -> None:
        x = torch.ones(4, requires_grad=True)
        y = spread(x)
        if here().part == 0:
            y.sum().backward()

    message = r"part 0 is at the backward of spread \(.*\) .* and part 1 has ended"
    with pytest.raises(UnequalParts, match=message):
        in_turns([run] * 2)
    assert threads() == 0


def test_values_of_unlike_shapes_do_not_meet() -> None:
    with pytest.raises(UnequalParts, match=r"float32\[1\] and part 1 .*float32\[2\]"):
        in_turns([lambda: total(torch.ones(1 + here().part))] * 2)


def test_a_dimension_that_does_not_divide_is_an_error_with_its_place() -> None:
    said = r"own \(.*test_conversions.py:\d+\): dimension 1 of \[2, 9\] does not divide into 3 runs"
    with using(Alone(2)), pytest.raises(ValueError, match=said):
        own(torch.ones(2, 9), 1, runs=3)


def test_a_stage_of_parts_that_nobody_runs_as_one_says_so() -> None:
    with pytest.raises(RuntimeError, match="one of several parts, and nothing says which"):
        total(torch.ones(1))


def test_the_file_stands_alone() -> None:
    text = Path(conversions.__file__).read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if "import" in line and "pdcompile" in line]
