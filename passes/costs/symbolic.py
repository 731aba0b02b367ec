"""Costs in closed form: shapes, FLOPs and bytes of every op in b and, where it has one, in s.

The model is captured at several sequence lengths, each capture being valid for every microbatch
size; polynomials are put through the numbers of all of them, and one size more than they need
says whether they are right.  What follows no such form (a list over samples, padding to a
multiple) is a number, and marked as that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall, example_call, resolve_batch
from pdcompile.batch.microbatches import take_cyclically
from pdcompile.errors import ConfigError, TraceError
from pdcompile.ir.graph import OpGraph, size_at
from pdcompile.passes.costs.costed_op import CostedOp, costed_ops
from pdcompile.passes.costs.flops import forward_flops
from pdcompile.passes.costs.rehearsal.kept_storages import kept_storages, new_of
from pdcompile.units import format_bytes, format_flops

Dims = dict[str, tuple[int, ...]]  # path of an input -> its dims that are the length
COUNT = 4  # lengths to capture at: three for a quadratic form, one that checks it


def sequence_dims(flat: FlatCall, layout: BatchLayout) -> tuple[Dims, str]:
    """Dims of the call's tensors that are the sequence length; ({}, why not) where none is.

    That is the first dim behind the samples of the first integer or boolean input that has one, and
    every dim of the same size in integer and boolean tensors and in tensors of two dims.
    """
    tensors = {path: leaf for path, leaf in flat.leaves.items() if isinstance(leaf, Tensor)}

    def rest(path: str) -> list[int]:
        return [dim for dim in range(tensors[path].ndim) if dim != layout.dims.get(path)]

    discrete = [path for path, leaf in tensors.items() if not leaf.dtype.is_floating_point]
    first = next((path for path in discrete if rest(path)), None)
    if first is None:
        return {}, "no integer or boolean input has a dim besides the samples"
    length = tensors[first].shape[rest(first)[0]]
    if length < 2:
        return {}, f"{first} has length {length}"
    found = {
        path: tuple(dim for dim in rest(path) if leaf.shape[dim] == length)
        for path, leaf in tensors.items()
        if path in discrete or leaf.ndim == 2
    }
    return {path: dims for path, dims in found.items() if dims}, ""


def probe_lengths(own: int, taken: Collection[int]) -> tuple[int, ...]:
    """The length of the example and three others, shorter ones where there are several.

    A model may have a longest length, seldom a shortest one.  Even numbers and other sizes of the
    call are avoided, so that a size tells which dimension it is.
    """
    odd = [n for n in range(max(3, own // 4), own) if n % 2 and n not in taken]
    if len(odd) < COUNT - 1:
        odd = [n for n in range(2, 2 * own + 2 * COUNT) if n != own and n not in taken]
    return (own, odd[0], odd[len(odd) // 2], odd[-1])


def with_length(flat: FlatCall, dims: Dims, length: int) -> FlatCall:
    """The same call at another length: entries repeated cyclically, or cut."""
    leaves = dict(flat.leaves)
    for path, which in dims.items():
        for dim in which:
            leaves[path] = take_cyclically(leaves[path], dim, length)
    return FlatCall(leaves, flat.spec)


Point = tuple[int, ...]  # (b,) or (b, s)
DEGREES = (1, 2)  # affine in b, at most quadratic in s


def symbols(count: int) -> tuple[Any, ...]:
    """``b``, or ``b`` and ``s``: positive integers."""
    import sympy  # type: ignore[import-untyped]

    return tuple(sympy.Symbol(name, positive=True, integer=True) for name in ("b", "s")[:count])


def polynomial_through(samples: Mapping[Point, int]) -> Any | None:
    """The sympy polynomial through all samples; None where no polynomial of low degree fits.

    Args:
        samples: integers on a grid; at least one more value of each symbol than its degree
            needs, so that a wrong form is noticed.

    Raises:
        ValueError: there are fewer.
    """
    import sympy

    axes = [sorted(set(axis)) for axis in zip(*samples, strict=True)]
    for axis, degree in zip(axes, DEGREES, strict=False):
        if len(axis) < degree + 2:
            raise ValueError(f"a fit of degree {degree} needs {degree + 2} sizes, not {axis}")
    nodes = tuple(product(*(axis[: n + 1] for axis, n in zip(axes, DEGREES, strict=False))))
    found = _solver(nodes) * sympy.Matrix([samples[node] for node in nodes])
    if any(found.dot(_monomials(point)) != number for point, number in samples.items()):
        return None
    return found.dot(_monomials(symbols(len(axes))))


@cache
def _solver(nodes: tuple[Point, ...]) -> Any:
    """The matrix that makes coefficients of values at these points."""
    import sympy

    return sympy.Matrix([_monomials(point) for point in nodes]).inv()


def _monomials(at: Sequence[Any]) -> list[Any]:
    powers = product(*(range(degree + 1) for degree in DEGREES[: len(at)]))
    return [prod(x**n for x, n in zip(at, each, strict=True)) for each in powers]


@dataclass(frozen=True, slots=True)
class SymbolicOp:
    """One op; sizes are ints or sympy expressions in ``b`` and ``s``.

    flops: of the forward.  output_bytes: of its results, 0 for views.  saved_bytes: what autograd
    keeps because of it and of no earlier op.  symbolic: all of these hold at every size; if not,
    those that do not are numbers of the example.
    """

    name: str
    target: str
    module_path: str
    shape: tuple[Any, ...]
    flops: Any
    output_bytes: Any
    saved_bytes: Any
    symbolic: bool

    @property
    def sizes(self) -> tuple[Any, ...]:
        """All that depends on b and s."""
        return (*self.shape, self.flops, self.output_bytes, self.saved_bytes)

    def with_sizes(self, sizes: Iterable[Any], **others: Any) -> SymbolicOp:
        """The same with other `sizes`."""
        *shape, flops, written, saved = sizes
        return replace(
            self, shape=tuple(shape), flops=flops, output_bytes=written, saved_bytes=saved, **others
        )


@dataclass(frozen=True, slots=True)
class SymbolicCosts:
    """Closed forms of one training microbatch of a model, ops in order.

    symbols: names in use, ("b",) or ("b", "s"), none for a model that nothing is split for.
    sequence: where s is, by input; `without` says why there is none.  example: the sizes of the
    example.  fitted: the sizes that the forms reproduce.
    """

    ops: tuple[SymbolicOp, ...]
    symbols: tuple[str, ...]
    sequence: tuple[tuple[str, tuple[int, ...]], ...]
    without: str
    example: tuple[int, ...]
    fitted: tuple[Point, ...]

    @property
    def flops(self) -> Any:
        """Operations of the whole forward."""
        return _sum(op.flops for op in self.ops)

    @property
    def output_bytes(self) -> Any:
        return _sum(op.output_bytes for op in self.ops)

    @property
    def saved_bytes(self) -> Any:
        """Bytes that autograd keeps of one microbatch, parameters and inputs left out."""
        return _sum(op.saved_bytes for op in self.ops)

    @property
    def symbolic_share(self) -> float:
        """Part of the example's bytes (outputs and saved) that is in entries marked symbolic."""
        numbers = self.at(*self.example).ops if self.symbols else self.ops
        sizes = [(op.symbolic, op.output_bytes + op.saved_bytes) for op in numbers]
        total = sum(size for _, size in sizes)
        return sum(size for known, size in sizes if known) / total if total else 1.0

    def at(self, b: int, s: int | None = None) -> SymbolicCosts:
        """The same with numbers for the symbols.

        Raises:
            ConfigError: a size is missing, superfluous or below 1.
        """
        given = {"b": b} | ({} if s is None else {"s": s})
        if tuple(given) != self.symbols or min(given.values()) < 1:
            raise ConfigError(
                f"the sizes {given} do not fit the symbols {', '.join(self.symbols) or 'none'}",
                remedy=self.without or "give every symbol a positive number",
            )
        ops = tuple(op.with_sizes(_at(size, given) for size in op.sizes) for op in self.ops)
        return replace(self, ops=ops, symbols=(), example=tuple(given.values()))

    def to_json(self) -> str:
        """Expressions as text, in Python's syntax."""
        found = asdict(self) | {
            "sequence": dict(self.sequence),
            **{name: str(getattr(self, name)) for name in ("flops", "output_bytes", "saved_bytes")},
            "symbolic_share": self.symbolic_share,
            "ops": [asdict(op.with_sizes(map(str, op.sizes))) for op in self.ops],
        }
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        lines = [
            f"{op.name}: {op.target} [{', '.join(map(str, op.shape))}] forward "
            f"{shown_flops(op.flops)}, output {shown_bytes(op.output_bytes)}, saved "
            f"{shown_bytes(op.saved_bytes)}{'' if op.symbolic else '  (concrete)'}"
            for op in self.ops
        ]
        return "\n".join([*lines, *self.summary()])

    def summary(self) -> list[str]:
        """Sums over all ops, what the symbols are, and how much has a closed form."""
        where = ", ".join(
            f"dim {' and '.join(map(str, dims))} of {path}" for path, dims in self.sequence
        )
        return [
            f"forward: {shown_flops(self.flops)}",
            f"outputs: {shown_bytes(self.output_bytes)}",
            f"saved for backward: {shown_bytes(self.saved_bytes)}",
            "b: the microbatch size" if "b" in self.symbols else f"at {_sizes(self.example)}",
            f"s: {where}" if where else f"no s: {self.without}",
            f"in closed form: {self.symbolic_share:.1%} of the bytes",
        ]


def _sizes(example: tuple[int, ...]) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip("bs", example, strict=False))


def shown_flops(count: Any) -> str:
    """A number with its prefix, ``6.44 GFLOP``; a formula with its unit."""
    return f"{count} FLOP" if getattr(count, "free_symbols", None) else format_flops(int(count))


def shown_bytes(count: Any) -> str:
    """A number with its prefix, ``1.50 MB``; a formula with its unit."""
    return f"{count} bytes" if getattr(count, "free_symbols", None) else format_bytes(int(count))


def symbolic_costs(
    model: nn.Module,
    example_inputs: Any,
    *,
    example_target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    batch_dims: Any = 0,
) -> SymbolicCosts:
    """Closed forms of a training microbatch, in its size b and the sequence length s.

    The model is captured five times or so; nothing is computed, and it is left as it was.

    Args:
        example_inputs: of one minibatch, as for `compile`.
        example_target: what `loss_fn` compares outputs with.
        loss_fn: as for `compile`.
        batch_dims: as for `compile`.

    Raises:
        ConfigError, InputError: the inputs do not fit the model.
    """
    from pdcompile.passes.trace import capture

    flat = example_call(model, example_inputs, example_target)
    layout = resolve_batch(flat, batch_dims)

    def captured(call: FlatCall) -> OpGraph:
        return capture(model, call, layout, loss_fn).train

    own = captured(flat)
    dims, without = sequence_dims(flat, layout)
    graphs: dict[int, OpGraph] = {}
    if dims:
        graphs, without = _graphs(flat, layout, dims, own, captured)
    sizes = _batch_sizes(own, list(graphs.values()))
    if not layout.splits or len(sizes) < 3:
        reason = without or "it is captured for one microbatch size only"
        return _concrete(own, reason if layout.splits else "nothing of the call is split")
    samples: dict[Point, list[SymbolicOp]] = {
        (b, s): _numbers(graph, b) for (s, graph), b in product(graphs.items(), sizes)
    } or {(b,): _numbers(own, b) for b in sizes}
    example = (own.batch_size, next(iter(graphs))) if graphs else (own.batch_size,)
    return SymbolicCosts(
        ops=tuple(
            _op({point: numbers[i] for point, numbers in samples.items()}, example)
            for i in range(len(own.ops))
        ),
        symbols=tuple(str(symbol) for symbol in symbols(len(example))),
        sequence=tuple(dims.items()) if graphs else (),
        without=without,
        example=example,
        fitted=tuple(samples),
    )


def _graphs(
    flat: FlatCall,
    layout: BatchLayout,
    dims: Dims,
    own: OpGraph,
    captured: Callable[[FlatCall], OpGraph],
) -> tuple[dict[int, OpGraph], str]:
    """A graph for each length, the example's first; or none, and why."""
    path, (dim, *_) = next(iter(dims.items()))
    length = flat.leaves[path].shape[dim]
    taken = {layout.size} | {
        size
        for other, leaf in flat.leaves.items()
        for i, size in enumerate(getattr(leaf, "shape", ()))
        if i not in dims.get(other, ())
    }
    graphs = {length: own}
    for size in probe_lengths(length, taken)[1:]:
        try:
            graph = captured(with_length(flat, dims, size))
        except TraceError as error:
            return {}, f"at length {size}: {error.message}"
        if reason := _diverges(own, graph):
            return {}, f"forward runs other ops at length {size} than at {length}: {reason}"
        graphs[size] = graph
    return graphs, ""


def _diverges(one: OpGraph, other: OpGraph) -> str:
    for a, b in zip(one.ops, other.ops, strict=False):
        if any(getattr(a, n) != getattr(b, n) for n in ("name", "target", "module_path", "inputs")):
            return f"{b.target} for {a.target} ({a.source})"
    if len(one.ops) != len(other.ops):
        return f"{len(other.ops)} for {len(one.ops)}"
    return ""


def _batch_sizes(own: OpGraph, others: Sequence[OpGraph]) -> list[int]:
    """The example's microbatch size and three others that all captures are valid for."""
    graphs = [own, *others]
    low = max(graph.sizes.smallest for graph in graphs)
    high = min((g.sizes.largest for g in graphs if g.sizes.largest is not None), default=None)
    fitting = [n for n in (2, 3, 5, 7) if n >= low and (high is None or n <= high)]
    return sorted({own.batch_size, *fitting[:3]})


def _numbers(graph: OpGraph, b: int) -> list[SymbolicOp]:
    """Costs of each op at one size; an opaque module has no closed form."""
    kept = new_of(kept_storages(graph, b))

    def numbers(call: CostedOp) -> SymbolicOp:
        op = call.op
        shape = tuple(size_at(size, b) for size in graph.values[op.name].shape)
        return SymbolicOp(
            op.name, op.target, op.module_path, shape, forward_flops(call), call.output_bytes,
            kept[op.name], not op.opaque,
        )  # fmt: skip

    return [numbers(call) for call in costed_ops(graph, b)]


def _op(samples: Mapping[Point, SymbolicOp], example: Point) -> SymbolicOp:
    """Forms of an op's sizes; numbers of the example where they follow none."""
    own = samples[example]
    if len({len(op.shape) for op in samples.values()}) > 1:
        return replace(own, symbolic=False)
    found, known = [], own.symbolic
    for number, *each in zip(own.sizes, *(op.sizes for op in samples.values()), strict=True):
        form = number
        if len(set(each)) > 1:
            form = polynomial_through(dict(zip(samples, each, strict=True)))
        known = known and form is not None
        found.append(number if form is None else form)
    return own.with_sizes(found, symbolic=known)


def _concrete(graph: OpGraph, reason: str) -> SymbolicCosts:
    point = (graph.batch_size,)
    ops = tuple(replace(op, symbolic=False) for op in _numbers(graph, graph.batch_size))
    return SymbolicCosts(ops, (), (), reason, point, (point,))


def _at(form: Any, given: Mapping[str, int]) -> int:
    """A number for an expression in the named symbols."""
    if isinstance(form, int):
        return form
    by_name = {str(symbol): symbol for symbol in form.free_symbols}
    return int(form.subs({by_name[name]: n for name, n in given.items() if name in by_name}))


def _sum(forms: Iterator[Any]) -> Any:
    import sympy

    found = sympy.expand(sympy.Add(*forms))
    return int(found) if found.is_Integer else found
