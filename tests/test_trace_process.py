"""Questions of forward to its process: the rank, the environment, the time."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pdcompile.batch import example_call, resolve_batch
from pdcompile.ir.graph import Capture
from pdcompile.passes import trace
from pdcompile.passes.trace.tape.interceptor import patched
from tests.helpers.captures import make


def capture(forward: Any, loss: Any = None) -> Capture:
    model = make(forward)
    flat = example_call(model, torch.ones(4, 8), torch.ones(4, 8) if loss else None)
    return trace.capture(model, flat, resolve_batch(flat, 0), loss)


def by_environment(self: Any, x: Tensor) -> Tensor:
    return self.lin(x).relu() if os.environ.get("PDC_TEST") else self.lin(x)


def by_getenv(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) if os.getenv("PDC_TEST", "1") == "1" else x


def by_time(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) if time.time() > 0 else x


@pytest.mark.parametrize(
    ("forward", "what"),
    [(by_environment, "the environment"), (by_getenv, "the environment"), (by_time, "the time")],
)
def test_what_is_asked_is_told_with_its_line(forward: Any, what: str) -> None:
    with pytest.warns(UserWarning, match=rf"asks for {what} \(tests/test_trace_process.py:\d+\)"):
        capture(forward)


def test_the_rank_and_the_loss() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        try:
            scale = dist.get_rank()
        except ValueError:  # there is no group here
            scale = 2
        return ((output - target) * scale).pow(2).mean()

    with pytest.warns(UserWarning, match="asks for its rank"):
        capture(lambda self, x: self.lin(x), loss)


def test_nothing_is_told_of_others_and_all_is_put_back() -> None:
    before = (time.time, dist.get_rank, type(os.environ).__getitem__)
    capture(lambda self, x: self.lin(x))
    assert (time.time, dist.get_rank, type(os.environ).__getitem__) == before


def test_what_is_patched_is_put_back_as_it_was() -> None:
    class Base:
        def name(self) -> str:
            return "base"

        @classmethod
        def kind(cls) -> str:
            return cls.__name__

    class Own(Base):
        pass

    other = classmethod(lambda cls: "other")
    with patched((Own, "name", lambda self: "other"), (Base, "kind", other)):
        assert (Own().name(), Own.kind()) == ("other", "other")
    assert "name" not in vars(Own)
    assert (Own().name(), Own.kind(), Base.kind()) == ("base", "Own", "Base")
