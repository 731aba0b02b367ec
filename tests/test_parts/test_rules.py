"""Every rule is right: an op on its operands' parts, put together, is the op on the whole.

One table of ops with small operands.  Each is run in double precision, whole and in 2 and 3 parts
in every way that its rule allows, dimensions divided further at random; results and gradients of
all operands are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pdcompile.ir.execution import Lookup, run_op
from pdcompile.ir.graph import ListOf, Op, OpGraph, Ref, Slice
from pdcompile.parts.shard import Shard
from pdcompile.parts.turns import in_turns
from pdcompile.passes.parts.atoms import Extent, fresh, join, leaves
from pdcompile.passes.parts.axes import Axes, OpAxes, Way
from pdcompile.passes.parts.families import divides
from pdcompile.passes.parts.layout import SUM, Layout
from pdcompile.passes.parts.local import local_op
from pdcompile.passes.parts.rules import RULES
from tests.helpers.graphs import GraphBuilder

F = "torch.nn.functional."
x, w, y, z, c = (Ref(name) for name in "xwyzc")
ALL = Slice()


@dataclass(frozen=True)
class Case:
    """An op and its operands: ``x:4,6 y:6<5`` is 4 x 6 floats and 6 integers below 5, ``?`` is of
    truth values.  `ways`: how many it must have at least."""

    target: str
    operands: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    method: bool = False
    ways: int = 1

    def __str__(self) -> str:
        return f"{self.target} {self.operands}"


def method(target: str, operands: str, *args: Any, ways: int = 1, **kwargs: Any) -> Case:
    return Case(target, operands, args, tuple(kwargs.items()), method=True, ways=ways)


def function(target: str, operands: str, *args: Any, ways: int = 1, **kwargs: Any) -> Case:
    return Case(target, operands, args, tuple(kwargs.items()), ways=ways)


def getitem(operands: str, index: Any, ways: int = 1) -> Case:
    return function("operator.getitem", operands, x, index, ways=ways)


CASES = [
    function("operator.add", "x:4,6 y:6", x, y, ways=2),
    function("operator.mul", "x:4,1,6 y:4,1", x, y, ways=2),
    function("torch.where", "x:4,6? y:4,6 z:6", x, y, z, ways=2),
    function(F + "gelu", "x:4,6", x, ways=2),
    function("operator.iadd", "x:4,6 y:6", x, y, ways=2),
    method("float", "x:4,6", x, ways=2),
    method("type_as", "x:4,6 y:2", x, y, ways=2),
    function(F + "dropout", "x:4,6", x, 0.0, ways=2),
    function(F + "linear", "x:4,6,8 w:12,8 y:12", x, w, y, ways=4),
    function(F + "linear", "x:6,8 w:12,8", x, w, ways=3),
    function("operator.matmul", "x:2,4,6 y:6,4", x, y, ways=4),
    function("operator.matmul", "x:2,4,6 y:1,6,4", x, y, ways=4),
    function("operator.matmul", "x:4,6 y:6", x, y, ways=2),
    function("operator.matmul", "x:6 y:6,4", x, y, ways=2),
    function("torch.bmm", "x:2,4,6 y:2,6,4", x, y, ways=4),
    function("torch.addmm", "x:4 y:6,8 z:8,4", x, y, z, ways=3),
    function("torch.addmm", "x:6,1 y:6,8 z:8,4", x, y, z, beta=2, ways=2),
    function("torch.baddbmm", "x:2,1,4 y:2,6,8 z:2,8,4", x, y, z, beta=0.5, ways=3),
    function("torch.outer", "x:4 y:6", x, y, ways=2),
    function("torch.einsum", "x:2,4,6 y:6,4,8", "bTd, dTe -> Tbe", x, y, ways=4),
    function("torch.einsum", "x:2,4 y:4,6", "ab,bc->ca", ListOf((x, y)), ways=3),
    function(F + "scaled_dot_product_attention", "x:2,4,6,8 y:2,4,3,8 z:2,4,3,6", x, y, z, ways=4),
    function(
        F + "scaled_dot_product_attention", "x:2,4,6,8 y:2,4,6,8 z:2,4,6,2", x, y, z,
        is_causal=True, ways=3,
    ),
    function(
        F + "scaled_dot_product_attention", "x:2,4,6,8 y:2,4,3,8 z:2,4,3,8 w:2,1,6,3?",
        x, y, z, attn_mask=w, ways=4,
    ),
    function(
        F + "scaled_dot_product_attention", "x:2,8,6,4 y:2,4,3,4 z:2,4,3,4 w:6,3",
        x, y, z, attn_mask=w, enable_gqa=True, ways=4,
    ),
    function(
        F + "scaled_dot_product_attention", "x:2,8,6,4 y:2,4,3,4 z:2,4,3,4 w:2,8,6,3",
        x, y, z, attn_mask=w, enable_gqa=True, ways=4,
    ),
    function(F + "embedding", "x:4,6<12 w:12,8", x, w, ways=4),
    function(F + "embedding", "x:4,6<12 w:12,8", x, w, padding_idx=-3, ways=4),
    function(F + "cross_entropy", "x:6,12 y:6<12", x, y, ways=2),
    function(F + "cross_entropy", "x:12 y:<12", x, y),
    function(F + "cross_entropy", "x:6,4,12 y:6,12<4", x, y, ignore_index=1, ways=3),
    function(
        F + "cross_entropy", "x:6,12 y:6<12", x, y, None, None, 3, None, "sum", 0.1, ways=2
    ),
    function(
        F + "cross_entropy", "x:6,12 y:6<12", x, y, reduction="none", label_smoothing=0.2, ways=2
    ),
    function(F + "cross_entropy", "x:6,12 y:6<12", x, y, label_smoothing=0.2, ways=2),
    function(F + "layer_norm", "x:4,6,8 w:8 y:8", x, (8,), w, y, ways=2),
    function(F + "rms_norm", "x:4,6,8 w:6,8", x, (6, 8), w),
    function(F + "group_norm", "x:2,12,4 w:12 y:12", x, 6, w, y, ways=2),
    function(F + "batch_norm", "x:4,6,2 w:6 y:6", x, None, None, w, y, training=True),
    function(F + "conv1d", "x:2,8,5 w:12,8,3 y:12", x, w, y, ways=3),
    function(F + "conv2d", "x:2,8,5,5 w:12,2,3,3 y:12", x, w, y, 1, 1, 1, 4, ways=4),
    function(F + "conv2d", "x:4,6,5,5 w:6,1,3,3", x, w, groups=6, ways=2),
    function(F + "conv_transpose1d", "x:2,8,5 w:8,3,3 y:6", x, w, y, 2, groups=2, ways=3),
    function(F + "max_pool2d", "x:2,4,6,6", x, 2, ways=2),
    function(F + "interpolate", "x:2,4,6,6", x, scale_factor=2, ways=2),
    function(F + "softmax", "x:4,6,8", x, dim=1, ways=2),
    method("cumsum", "x:4,6,8", x, -1, ways=2),
    function("torch.topk", "x:4,6", x, 3),
    function("torch.sort", "x:4,6", x, dim=0),
    method("sum", "x:4,6,8", x, (0, 2), keepdim=True, ways=3),
    method("sum", "x:4,6", x, ways=2),
    method("mean", "x:4,6,8", x, -1, ways=2),
    function("torch.amax", "x:4,6,8", x, 1, True, ways=2),
    method("max", "x:4,6,8", x, 1, ways=2),
    method("min", "x:4,6,8", x, -1, True, ways=2),
    function("torch.maximum", "x:4,6 y:6", x, y, ways=2),
    function("torch.max", "x:4,6 y:6", x, y, ways=2),
    method("view", "x:4,6,8", x, 4, 2, 3, -1, ways=4),
    method("view", "x:4,6,8", x, (4, 48), ways=3),
    method("reshape", "x:4,6,8", x, (24, 2, 4), ways=4),
    method("reshape_as", "x:4,6 y:2,2,6", x, y, ways=3),
    method("unflatten", "x:4,12", x, 1, (2, 6), ways=3),
    method("squeeze", "x:4,1,2", x, ways=2),
    method("unsqueeze", "x:4,6", x, 1, ways=2),
    method("flatten", "x:4,6,2", x, 1, ways=3),
    method("transpose", "x:4,6,8", x, 1, -1, ways=3),
    method("permute", "x:4,6,8", x, (2, 0, 1), ways=3),
    method("t", "x:4,6", x, ways=2),
    method("expand", "x:4,1,6", x, 4, 8, -1, ways=3),
    method("expand", "x:4,1,6", x, (2, 4, 8, 6), ways=4),
    method("expand_as", "x:4,1 y:2,4,6", x, y, ways=3),
    method("repeat", "x:4,6", x, 3, 1, 2, ways=2),
    method("repeat", "x:1,6", x, 4, 1, ways=1),
    method("repeat_interleave", "x:4,6", x, 2, dim=1, ways=2),
    function("torch.narrow", "x:4,6", x, 1, 2, 3),
    method("select", "x:4,6", x, 1, 2),
    method("unfold", "x:4,8", x, 1, 4, 2),
    function("torch.split", "x:4,12", x, 4, 1, ways=2),
    function("torch.split", "x:4,12", x, ListOf((4, 4, 4)), -1, ways=2),
    function("torch.split", "x:4,12", x, ListOf((4, 2, 6)), 1),
    method("chunk", "x:6,12", x, 3, dim=-1, ways=2),
    method("unbind", "x:4,3", x, 1),
    function("torch.cat", "x:4,6 y:4,2", ListOf((x, y)), 1),
    function("torch.cat", "x:0 y:4,6", ListOf((x, y)), -1, ways=2),
    function("torch.cat", "x:4,0 y:4,6", ListOf((x, y)), -1, ways=2),
    function("torch.cat", "x:4,6 y:4,0 z:4,2", ListOf((x, y, z)), -1),
    function("torch.stack", "x:4,6 y:4,6", (x, y), 1, ways=2),
    function(F + "pad", "x:4,6,8", x, (1, 2), ways=2),
    method("roll", "x:4,6", x, 2, 1),
    method("flip", "x:4,6", x, (1,)),
    method("tril", "x:4,6,6", x),
    function("torch.gather", "x:4,6 y:4,2<6", x, 1, y, ways=2),
    function("torch.gather", "x:4,6,3 y:4,2,2<3", x, 2, y),
    function("torch.index_select", "x:4,6 y:3<6", x, 1, y, ways=2),
    function(F + "one_hot", "x:4,6<5", x, 5, ways=2),
    getitem("x:4,6,8", (ALL, None, Slice(1, 4)), ways=2),
    getitem("x:4,6,8", (..., Slice(None, 8), 3), ways=1),
    getitem("x:4,6,8", 2, ways=2),
    getitem("x:4,6 y:3,2<4", y, ways=3),
    getitem("x:4,6,8 y:3<4", (ALL, y), ways=3),
    getitem("x:4,6,8 y:3,1<4 z:1,2<6", (y, z), ways=3),
]  # fmt: skip


def operands_of(case: Case) -> dict[str, Tensor]:
    """The operands of a case, drawn from a seed."""
    made = {}
    draw = torch.Generator().manual_seed(1)
    for text in case.operands.split():
        name, _, shape = text.partition(":")
        sizes, _, below = shape.rstrip("?").partition("<")
        dims = [int(size) for size in sizes.split(",") if size]
        if below:
            made[name] = torch.randint(int(below), dims, generator=draw)
        elif shape.endswith("?"):
            made[name] = torch.randint(4, dims, generator=draw) > 0
        else:
            made[name] = torch.randn(dims, generator=draw, dtype=torch.float64)
    return made


def graph_of(case: Case, given: Mapping[str, Tensor], whole: Any) -> tuple[OpGraph, Op]:
    """The graph of one op, and of the items of its result."""
    builder = GraphBuilder()
    for name, tensor in given.items():
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        builder.input(f"given_{name}", shape, dtype)
        builder.op(name, "torch.clone", (Ref(f"given_{name}"),), shape=shape, dtype=dtype)
    made = [whole] if isinstance(whole, Tensor) else list(whole)
    container = not isinstance(whole, Tensor)
    builder.op(
        "made", case.target, case.args, kind="method" if case.method else "function",
        kwargs=case.kwargs, shape=() if container else tuple(whole.shape),
        dtype="container" if container else str(whole.dtype).removeprefix("torch."),
        mutates=("x",) if case.target.startswith("operator.i") else (),
    )  # fmt: skip
    if container:
        for i, item in enumerate(made):
            builder.op(f"item_{i}", "operator.getitem", (Ref("made"), i), shape=tuple(item.shape))
    graph = builder.build((Ref("made") if not container else Ref("item_0"),))
    return graph, next(op for op in graph.ops if op.name == "made")


def shard(layout: Layout, parts: int) -> Shard:
    sizes = tuple(size for size in layout.sizes if isinstance(size, int))
    return Shard("x", layout.dim, sizes, layout.which, parts)


def leaf(tensor: Tensor) -> Tensor:
    made = tensor.detach().clone()
    return made.requires_grad_(made.is_floating_point())


def results(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def gradients(
    made: list[Tensor], above: list[Tensor], read: dict[str, Tensor]
) -> dict[str, Tensor]:
    pairs = [(m, a) for m, a in zip(made, above, strict=True) if m.requires_grad]
    wanted = {name: one for name, one in read.items() if one.requires_grad}
    if not pairs or not wanted:
        return {}
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, [*wanted.values()], grads, allow_unused=True)
    return {n: torch.zeros_like(wanted[n]) if g is None else g
            for n, g in zip(wanted, found, strict=True)}  # fmt: skip


def weights_for(made: list[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(one.shape, generator=draw, dtype=torch.float64) for one in made]


def run(op: Op, read: Mapping[str, Tensor]) -> Any:
    own = {name: one.clone() if name in op.mutates else one for name, one in read.items()}
    return run_op(op, own, Lookup(nn.Module(), 4))


def check_way(
    graph: OpGraph, found: OpAxes, way: Way, parts: int, given: dict[str, Tensor]
) -> None:
    """Compares the whole op with its parts, split in one way."""
    op, summed = found.op, way.result == SUM
    whole = {name: leaf(tensor) for name, tensor in given.items()}
    expected = results(run(op, whole))
    above = weights_for(expected)
    wanted = gradients(expected, above, whole)
    own = local_op(graph, op, way, parts)
    wants = {o.name: one for o, one in zip(found.call.operands, way.operands, strict=True)}
    added = {found.call.operands[i].name for i in way.added}
    together = summed or not way.results  # what parts give is no slice

    def one_part(part: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        read = {name: leaf(shard(wants[name], parts).own(tensor, part))
                if name in wants and wants[name].kind == "S" else leaf(tensor)
                for name, tensor in given.items()}  # fmt: skip
        results_here = results(run(own, read))
        up = [one if together else shard(way.results[i], parts).own(one, part)
              for i, one in enumerate(above)]  # fmt: skip
        return results_here, gradients(results_here, up, read)

    done = in_turns([partial(one_part, part) for part in range(parts)])
    made, grads = [one for one, _ in done], [one for _, one in done]
    for i, one in enumerate(expected):
        pieces = [here[i].detach() for here in made]
        if together:
            joined = sum(pieces) if summed else pieces[0]
            assert summed or all(torch.equal(piece, joined) for piece in pieces)
        else:
            joined = shard(way.results[i], parts).joined(pieces)
        for name in added:
            bias = given[name]
            joined = joined + (bias[:, None, None][..., : one.dim() - 2].reshape(
                (-1,) + (1,) * (one.dim() - 2)) if "conv" in op.target else bias)  # fmt: skip
        torch.testing.assert_close(joined, one.detach(), msg=lambda m: f"{way}: {m}")
    for name, gradient in wanted.items():
        if name in added:
            continue
        pieces = [here[name] for here in grads]
        split = wants[name].kind == "S"
        joined = shard(wants[name], parts).joined(pieces) if split else sum(pieces)
        torch.testing.assert_close(joined, gradient, msg=partial("{}, {}: {}".format, way, name))


def divided(found: OpAxes, draw: st.DataObject) -> None:
    """Divides atoms of the operands further, at random."""
    for dims in found.dims.values():
        for dim in dims:
            for atom in leaves(dim):
                size = atom.extent.number
                factors = [n for n in range(2, size) if size % n == 0]
                if factors and draw.draw(st.booleans()):
                    outer = draw.draw(st.sampled_from(factors))
                    assert join((atom,), fresh(Extent(outer)) + fresh(Extent(size // outer)))


def ways_of(found: OpAxes) -> Iterator[tuple[Way, int]]:
    for way in found.ways:
        for parts in (2, 3):
            if divides(way.axis, parts):
                yield way, parts


@pytest.mark.parametrize("size", [1, 2])
def test_a_pool_without_samples_stays_whole(size: int) -> None:
    """It looks along what would be channels of another one."""
    case = function(f"{F}max_pool{size}d", "x:6,6,8" if size == 2 else "x:6,8", x, 3, 1, 1)
    given = operands_of(case)
    graph, op = graph_of(case, given, run(Op("made", **kind(case)), given))
    assert not Axes(graph).ops[op.name].ways


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_an_op_are_the_op(case: Case) -> None:
    given = operands_of(case)
    graph, op = graph_of(case, given, run(Op("made", **kind(case)), given))
    found = Axes(graph).ops[op.name]
    assert found.reason == ""
    assert len(found.ways) >= case.ways
    for way, parts in ways_of(found):
        check_way(graph, found, way, parts, given)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_factors_of_dimensions_are_split_too(case: Case, data: st.DataObject) -> None:
    given = operands_of(case)
    graph, op = graph_of(case, given, run(Op("made", **kind(case)), given))
    found = Axes(graph).ops[op.name]
    divided(found, data)
    for way, parts in ways_of(found):
        check_way(graph, found, way, parts, given)


def kind(case: Case) -> dict[str, Any]:
    return {"kind": "method" if case.method else "function", "target": case.target,
            "args": case.args, "kwargs": case.kwargs}  # fmt: skip


def test_every_rule_is_in_the_table() -> None:
    from pdcompile.passes.costs.costed_op import plain_name

    tried = {RULES[plain_name(Op("made", **kind(case)))] for case in CASES}
    left = {name for name, rule in RULES.items() if rule not in tried}
    assert left <= {"groupedmm", "multiheadattention"}  # which test_samples.py has
