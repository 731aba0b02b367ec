"""Forwards that go a way of their own at sizes inside the range: none of these is in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompile.passes.trace import trace
from tests.helpers.captures import make, rows

Odd = Callable[[Tensor], bool]


def _halved(x: Tensor) -> bool:
    n = x.shape[0]
    for _ in range(60):  # each uses the last one twice
        n = (n + n % 2) // 2
    return n == 0


def _counted(x: Tensor) -> bool:
    left = x.shape[0] * 64
    while left > 0:
        left -= 1
    return left == 1


ODD: dict[str, tuple[Odd, tuple[int, int]]] = {  # and the range with microbatches of 4
    "equal": (lambda x: x.shape[0] == 2, (3, 120)),
    "above": (lambda x: x.shape[0] == 9, (1, 8)),
    "unequal": (lambda x: (x.size(0) != 2) is False, (3, 120)),
    "in a tuple": (lambda x: x.size(dim=0) in (2, 3), (4, 120)),
    "in a set": (lambda x: x.shape[0] in {2, 3}, (4, 120)),
    "in a table": (lambda x: {2: True}.get(len(x), False), (3, 120)),
    "divides": (lambda x: x.shape[0] % 7 == 0, (1, 6)),
    "truth": (lambda x: not x.shape[0] - 5, (1, 4)),
    "between": (lambda x: 10 < x.shape[0] < 20, (1, 10)),
    "two answers": (lambda x: (x.shape[0] > 10) & (x.shape[0] < 20), (1, 10)),
    "length": (lambda x: len(x) == 2, (3, 120)),
    "elements": (lambda x: x.numel() == 16, (3, 120)),
    "shape": (lambda x: x.shape == (2, 8), (3, 120)),
    "an undefined answer": (
        lambda x: 8 // (x.shape[0] - 2) == 8 if len(x) != 2 else False,
        (4, 120),
    ),
    "another dimension": (lambda x: x.shape[1] == 2, (1, 120)),
    "one sample": (lambda x: x.shape[0] == 1, (2, 120)),
    "never": (lambda x: x.shape[0] == 0, (1, 120)),
    "never, after many steps": (_halved, (1, 120)),
    "never, after more steps": (_counted, (1, 120)),
    "a copy": (lambda x: copy.deepcopy({"n": x.shape[0]})["n"] == 2, (3, 120)),
    "many questions": (lambda x: sum(i % x.shape[0] == 0 for i in range(1, 3000)) < 3, (1, 120)),
}


def _model(odd: Odd) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Any:
        x = self.lin(x)
        return self.second(x - x.mean(0) if odd(x) else x)

    return make(forward, second=nn.Linear(8, 8))


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ODD)
def test_the_range_has_no_size_at_which_forward_computes_something_else(kind: str) -> None:
    odd, ends = ODD[kind]
    model = _model(odd)
    for training in (True, False):
        graph = trace(model.train(training), (rows(4),))
        assert (graph.sizes.smallest, graph.sizes.largest) == ends
        module = graph.to_module(model)
        for size in range(ends[0], ends[1] + 1):
            assert torch.equal(module(rows(size)), model(rows(size)))
