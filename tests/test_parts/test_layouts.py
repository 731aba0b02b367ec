"""Layouts of whole models: parts that follow them compute what the model computes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import GPT, loss_fn
from pdcompile.batch import example_call, resolve_batch
from pdcompile.errors import ConfigError
from pdcompile.ir.execution import Lookup, execute, run_op
from pdcompile.ir.graph import Attr, Op, OpGraph, Ref, size_at, walk
from pdcompile.parts import conversions
from pdcompile.parts.shard import Split
from pdcompile.parts.turns import in_turns
from pdcompile.passes import trace
from pdcompile.passes.parts.calls import operands
from pdcompile.passes.parts.layout import Layout
from pdcompile.passes.parts.layouts import Layouts, lay_out
from pdcompile.passes.parts.local import local_op
from tests.helpers import generated, models

B = 4
FAMILIES: tuple[Split, ...] = ("width", "width+sequence", "sequence", "context")


@cache
def captured(name: str) -> tuple[nn.Module, OpGraph, dict[str, Tensor]]:
    """A model in double precision, its training graph, and values of the graph's inputs."""
    torch.manual_seed(0)
    model = {
        "gpt": models.gpt, "mlp": models.mlp, "convnet": models.convnet, "unet": models.unet,
    }.get(name, partial(transformer, name))().double()  # fmt: skip
    if name in ("gpt", "mlp", "convnet", "unet"):
        inputs, target = models.batch_for(model, B)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        target = target.double() if target.is_floating_point() else target
        flat = example_call(model, inputs, target)
        loss: Any = models.loss_for(model)
    else:
        ids = torch.randint(0, 48, (B, 12), generator=torch.Generator().manual_seed(1))
        flat, loss = example_call(model, {"input_ids": ids, "labels": ids}, None), None
    found = trace.capture(model, flat, resolve_batch(flat), loss, microbatch_size=B)
    graph = found.train
    given = {entry.name: flat.leaves[entry.path] for entry in graph.inputs}
    return model, graph, given


def transformer(name: str) -> nn.Module:
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16,
            "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "LlamaForCausalLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 32},
        "T5ForConditionalGeneration": {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32,
            "d_kv": 8, "decoder_start_token_id": 0, "dropout_rate": 0.0},
    }  # fmt: skip
    cls = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(vocab_size=48, **sizes[name]))
    return model.train()


class Part:
    """Runs the graph as one part, with the conversions that its layouts ask for."""

    def __init__(self, model: nn.Module, layouts: Layouts, part: int) -> None:
        self.graph, self.layouts, self.part = layouts.graph, layouts, part
        self.lookup = Lookup(model, B, constants=self.graph.tensor_values)
        self.tensors: dict[str, Tensor] = {}
        for fqn, info in self.graph.tensors.items():
            whole = self.lookup.tensor(fqn).detach()
            shard = layouts.shards.get(fqn)
            own = whole.clone() if shard is None else shard.own(whole, part)
            trained = info.requires_grad and info.kind == "parameter"
            self.tensors[fqn] = own.requires_grad_(trained)

    def run(self, given: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the gradients of this part's tensors."""
        values: dict[str, Any] = dict(given)
        made: dict[tuple[str, Layout], Tensor] = {}
        for op in self.graph.ops:
            layout = self.layouts.ops[op.name]
            read = {}
            for number, operand in enumerate(operands(op)):
                want = layout.operands[number]
                have = self.layouts.tensor(operand.name) if operand.of_model else (
                    self.layouts.of(operand.name))  # fmt: skip
                known = self.tensors if operand.of_model else values
                key = (operand.name, want)
                if key not in made or op.mutates:
                    made[key] = self.converted(known[operand.name], have, want)
                read[number] = made[key]
            result = self.ran(op, read)
            if layout.after is not None:
                result = self.converted(result, layout.result, layout.after)
                for number in layout.added:
                    bias = read[number]
                    channels = "conv" in op.target.lower()
                    dims = (-1,) + (1,) * (result.dim() - 2) if channels else bias.shape
                    result = result + bias.reshape(dims)
            values[op.name] = result
        loss = values[str(self.graph.loss)]
        wanted = {f: t for f, t in self.tensors.items() if t.requires_grad}
        found = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
        grads = zip(wanted, found, strict=True)
        return loss.detach(), {f: torch.zeros_like(wanted[f]) if g is None else g for f, g in grads}

    def ran(self, op: Op, read: Mapping[int, Any]) -> Any:
        """One op on what this part has: its operands under names of their own, by number."""
        own = local_op(self.graph, op, self.layouts.ops[op.name], self.layouts.parts)
        env: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for number, operand in enumerate(operands(op)):
            (tensors if operand.of_model else env)[operand.name] = read[number]
        if own.kind == "module":
            built = {k: v for k, v in own.constructor if k not in ("dtype", "device")}
            module = getattr(nn, own.target.rpartition(".")[2])(**built).double()
            module.train(self.graph.training)
            named = {fqn.rpartition(".")[2]: tensor for fqn, tensor in tensors.items()}
            named = {n: t for n, t in named.items() if getattr(module, n, None) is not None}
            args = [env[a.name] if isinstance(a, Ref) else a for a in own.args]
            return torch.func.functional_call(module, named, tuple(args))
        return run_op(own, env, Lookup(nn.Module(), B, constants=tensors))

    def converted(self, value: Any, have: Layout, want: Layout) -> Any:
        if have == want or not isinstance(value, Tensor):
            return value  # the items of a container are split already
        runs = int(size_at(have.runs, B)), int(size_at(want.runs, B))
        match have.kind, want.kind:
            case "I", "R":
                return conversions.spread(value) if value.is_floating_point() else value
            case "I", "S":
                return conversions.own(value, want.dim, runs=runs[1])
            case "S", ("I" | "R"):
                return conversions.gather(value, have.dim, runs=runs[0], spread=want.kind == "R")
            case "S", "S":
                return conversions.swap(
                    value, have.dim, want.dim, old_runs=runs[0], new_runs=runs[1]
                )
            case "P", ("I" | "R"):
                whole = conversions.total(value)
                return conversions.spread(whole) if want.kind == "R" else whole
            case "P", "S":
                return conversions.scatter(value, want.dim, runs=runs[1])
        raise AssertionError((have, want))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name",
    ["gpt", "mlp", "convnet",
     *(pytest.param(name, marks=pytest.mark.slow) for name in
       ("unet", "LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"))],
)  # fmt: skip
def test_parts_compute_the_model_and_its_gradients(name: str, family: Split) -> None:
    model, graph, given = captured(name)
    try:
        layouts = lay_out(graph, family, 2)
    except ConfigError:
        assert family == "context"  # mlp, convnet and unet have no sequence
        assert name in ("mlp", "convnet", "unet")
        return
    whole = {f: t for f, t in ((f, Lookup(model, B).tensor(f)) for f in graph.tensors
             if f not in graph.tensor_values) if t.requires_grad}  # fmt: skip
    lookup = Lookup(model, B, constants=graph.tensor_values)
    loss = execute(graph, given, lookup)[str(graph.loss)]
    expected = torch.autograd.grad(loss, [*whole.values()], allow_unused=True)
    parts = [Part(model, layouts, part) for part in range(2)]
    found = in_turns([partial(one.run, given) for one in parts])
    for one, _ in found:
        torch.testing.assert_close(one, loss.detach())
    for fqn, gradient in zip(whole, expected, strict=True):
        pieces = [grads[fqn] for _, grads in found]
        layout = layouts.tensor(fqn)
        if layout.kind == "S":
            made = layouts.shards[fqn].joined(pieces)
        else:
            made = pieces[0] + pieces[1] if layout.kind == "R" else pieces[0]
            assert layout.kind == "R" or torch.equal(*pieces)
        wanted = torch.zeros_like(made) if gradient is None else gradient
        torch.testing.assert_close(made, wanted, msg=partial("{} {}: {}".format, fqn, layout))


def test_the_layouts_of_gpt_are_those_of_megatron() -> None:
    _, graph, _ = captured("gpt")
    text = str(lay_out(graph, "width", 2))
    assert "heads: (R, S(0: 3 x [4] x 8)" in text
    assert "-> P, total I" in text
    assert not lay_out(graph, "width", 2).stays


def test_what_does_not_divide_is_refused_by_name() -> None:
    _, graph, _ = captured("mlp")
    with pytest.raises(ConfigError, match=r"parts=3: hidden \(16\) of .* do not divide") as caught:
        lay_out(graph, "width", 3)
    assert "parts=2 or 4 or 8, or split='samples'" in str(caught.value)
    with pytest.raises(ConfigError, match="split='context' divides nothing"):
        lay_out(graph, "context", 2)


@pytest.mark.parametrize(
    ("heads", "family", "parts", "said", "remedy"),
    [
        (4, "width", 3, r"parts=3: heads \(4\) of blocks.0.attention.* do not divide",
         "use parts=2 or 4, or split='samples'"),
        (4, "sequence", 3, r"split='sequence': attention at .*gpt.py:\d+ has 4 heads, which 3 ",
         "use parts=2 or 4, or split='context'"),
        (3, "sequence", 2, "has 3 heads, which 2 parts cannot share",
         "use parts=3, or split='context'"),
        (4, "context", 3, r"parts=3: sequence \(16\) of .* do not divide",
         "use parts=2 or 4 or 8, or split='samples'"),
    ],
)  # fmt: skip
def test_heads_and_sequences_that_parts_cannot_share_are_refused_by_name(
    heads: int, family: Split, parts: int, said: str, remedy: str
) -> None:
    model, ids = GPT(2, 16 * heads, heads, 16), torch.zeros(B, 16, dtype=torch.int64)
    _, _, found = generated.captured(model, ids, ids, loss_fn)
    with pytest.raises(ConfigError, match=said) as caught:
        lay_out(found.train, family, parts)
    assert remedy in str(caught.value)


def test_operands_are_numbered_as_they_appear() -> None:
    _, graph, _ = captured("gpt")
    for op in graph.ops:
        named = [o.name for o in operands(op) if op.kind != "module" or not o.of_model]
        read = walk((op.args, op.kwargs), (Ref, Attr))
        assert named == [one.name if isinstance(one, Ref) else one.fqn for one in read]
