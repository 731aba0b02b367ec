"""outputs="none": training sends nothing that only the model's outputs need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile import Cluster
from pdcompile.batch import example_call, resolve_batch
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Ref, walk
from pdcompile.passes.stages.loss_only import loss_only
from pdcompile.passes.trace import capture
from tests.helpers.llama import batch, llama


class Branches(nn.Module):
    """A loss, and beside it values that are costly, random, or written to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.aside = nn.Linear(4, 64)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        aside = self.aside(hidden).exp()
        noise = nn.functional.dropout(hidden, 0.5, self.training)
        hidden = nn.functional.dropout(hidden, 0.5, self.training)
        with torch.no_grad():
            self.seen.add_(hidden.sum(0))
        return {"loss": self.last(hidden).mean(), "aside": [aside, (noise,)], "hidden": hidden}


def captured(model: nn.Module, inputs: Any, loss_fn: Any = None, target: Any = None) -> Any:
    flat = example_call(model, inputs, target)
    return capture(model, flat, resolve_batch(flat, 0), loss_fn)


def compiled(model: nn.Module, outputs: str, **more: Any) -> Any:
    return pdcompile.compile(
        model, costs="estimated", cluster=Cluster.local(2), time_limit=2.0, outputs=outputs,
        optimizer=None, microbatches=2, **more,
    )  # fmt: skip


def test_what_has_an_effect_besides_its_value_stays() -> None:
    whole = captured(Branches(), torch.ones(4, 4))
    smaller = loss_only(whole)
    gone = {op.name for op in whole.train.ops} - {op.name for op in smaller.train.ops}
    paths = {op.module_path or op.target for op in whole.train.ops if op.name in gone}
    assert "aside" in paths
    assert [op.name for op in smaller.train.ops if op.draw is not None] == [
        op.name for op in whole.train.ops if op.draw is not None
    ]
    assert any(op.mutates or op.buffers_written for op in smaller.train.ops)
    assert [ref.name for ref in walk(smaller.train.output, Ref)] == [whole.train.loss]
    assert smaller.eval == whole.eval
    names = {op.name for op in smaller.train.ops}
    assert all(set(value.consumers) <= names for value in smaller.train.values.values())


def test_what_loss_fn_reads_stays() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.aside = nn.Linear(4, 2), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.aside(x)

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output[0], target)

    whole = captured(Two(), torch.ones(4, 4), loss_fn, torch.ones(4, 2))
    smaller = loss_only(whole)
    assert [op.module_path for op in smaller.train.ops if op.kind == "module"] == ["layer"]
    assert len(walk(smaller.train.output, Ref)) == 1


def test_without_a_loss_and_without_other_outputs_nothing_changes() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean()

    alone = captured(Alone(), torch.ones(4, 4))
    assert loss_only(alone) is alone
    plain = captured(nn.Linear(4, 2), torch.ones(4, 4))
    assert loss_only(plain) is plain


def test_gradients_and_buffers_are_the_same_with_less_traffic() -> None:
    found = {}
    for outputs in ("none", "last"):
        torch.manual_seed(0)
        model = Branches()
        pipe = compiled(model, outputs)
        result = pipe.forward_backward(torch.arange(16.0).view(4, 4))
        grads = {name: p.grad for name, p in pipe.named_parameters()}
        found[outputs] = float(result.loss), grads, model.seen.clone()
        if outputs == "none":
            with pytest.raises(ConfigError, match="gets no outputs of this call"):
                _ = result.outputs
            assert set(pipe.predict(torch.ones(4, 4))) == {"loss", "aside", "hidden"}
            assert result.loss is not None
        else:
            assert set(result.outputs) == {"loss", "aside", "hidden"}
    (loss, grads, seen), (expected, theirs, buffer) = found["none"], found["last"]
    assert loss == expected
    assert torch.equal(seen, buffer)
    for name, grad in grads.items():
        assert torch.equal(grad, theirs[name]) if grad is not None else theirs[name] is None


def test_the_caches_of_a_decoder_are_not_sent() -> None:
    traffic = {}
    for outputs in ("none", "last"):
        pipe = compiled(llama(use_cache=True), outputs, verify="off")
        pipe.prepare(**batch(0))
        traffic[outputs] = {edge.value: edge.bytes for edge in pipe.plan.edges}
        assert any("outputs too" in note for note in pipe.plan.notes) == (outputs == "last")
    assert sum(traffic["none"].values()) < sum(traffic["last"].values())
