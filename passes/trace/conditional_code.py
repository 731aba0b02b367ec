"""Code that forward skips where a mask chooses nothing: ``if rows.numel(): …``.

It is captured as if it always ran.  With nothing chosen every operator in it works on empty
tensors and writes nothing; only gradients would differ, zero where eager has None.  So a tensor
that it writes into others is detached when it is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdcompile.ir.graph import Op, Ref, Value, rewritten
from pdcompile.passes.trace.tape.results import beside

# In-place writes at indices, and the positions of the index and of what is written there.
_WRITES = {"index_add_": (2, 3), "index_copy_": (2, 3), "operator.setitem": (1, 2)}


def left_out(
    usual: Sequence[Op],
    empty: Sequence[Op],
    values: Mapping[str, Value],
    single: Mapping[str, Value],
) -> tuple[set[str], dict[str, str], dict[str, str]] | None:
    """Finds the usual ops that do not run where nothing is chosen.

    Args:
        values: of the usual recording, with `varies` filled in.
        single: of the recording in which every mask chooses one element.

    Returns (names of those ops; name in `empty` to usual name; name after a skipped write to the
    name before it); None where skipping them makes any other difference.
    """
    skipped: set[str] = set()
    names: dict[str, str] = {}
    before: dict[str, str] = {}
    rest = list(reversed(empty))
    for op in usual:
        if rest and form_of(op, before) == form_of(rest[-1], names):
            names[rest.pop().name] = op.name
            continue
        if not _works_on_nothing(op, values, single):
            return None
        skipped.add(op.name)
        if op.mutates and op.target != "operator.setitem":
            base = op.args[0].name if isinstance(op.args[0], Ref) else ""
            before[op.name] = before.get(base, base)
    drawn = [op.module_path for op in usual if op.draw is not None]
    for op in usual:
        if op.name in skipped:
            if op.draw is not None and drawn.count(op.module_path) > 1:
                return None  # later draws would be other ones
        elif any(name in skipped and name not in before for name in op.inputs):
            return None
    return None if rest else (skipped, names, before)


def renamed(argument: Any, names: Mapping[str, str] | None) -> Any:
    """The argument with other names in its Refs; None: without any."""

    def other(part: Any) -> Any:
        if type(part) is not Ref:
            return part
        return Ref("" if names is None else names.get(part.name, part.name))

    return rewritten(argument, other)


def form_of(op: Op, names: Mapping[str, str] | None = None) -> Op:
    """The op for comparison: without its own name, and with other names of values or none."""
    mutates = renamed(tuple(map(Ref, op.mutates)), names)
    return replace(
        op, name="", variable="", call_index=0, args=renamed(op.args, names),
        kwargs=renamed(op.kwargs, names), mutates=tuple(ref.name for ref in mutates),
    )  # fmt: skip


def with_gates(
    ops: Sequence[Op], values: Mapping[str, Value], skipped: Collection[str]
) -> tuple[tuple[Op, ...], dict[str, Value]]:
    """The ops and values where tensors that `skipped` ops write are detached when empty."""
    made: list[Op] = []
    known = dict(values)
    for op in ops:
        if op.name not in skipped or not op.mutates:
            made.append(op)
            continue
        position = _WRITES[op.target][1]
        written = op.args[position]
        assert isinstance(written, Ref)
        if known[written.name].requires_grad:
            gate = _gate(op, known[written.name], known)
            made += gate
            args = (*op.args[:position], Ref(gate[-1].name), *op.args[position + 1 :])
            op = replace(op, args=args)
        made.append(op)
    return tuple(made), known


def _works_on_nothing(op: Op, values: Mapping[str, Value], single: Mapping[str, Value]) -> bool:
    def as_chosen(argument: Any) -> bool:
        """Whether a tensor has one row for each chosen element."""
        dims = values[argument.name].varies if isinstance(argument, Ref) else ()
        return bool(dims) and all(single[argument.name].shape[dim] == 1 for dim in dims)

    if op.opaque or op.buffers_written or op.region != "forward":
        return False
    if not op.mutates:
        # Without a draw it may run: only other skipped ops read its result.
        return op.draw is None or bool(values[op.name].varies)
    if op.target not in _WRITES or op.kwargs:
        return False
    index, written = _WRITES[op.target]
    if len(op.args) <= written or not as_chosen(op.args[written]):
        return False
    chosen = op.args[index]
    mask = isinstance(chosen, Ref) and values[chosen.name].dtype == "bool"
    return mask or as_chosen(chosen)


def _gate(op: Op, value: Value, known: dict[str, Value]) -> list[Op]:
    """``(x.detach(), x)[x.numel() != 0]`` as ops, before an op that uses x."""
    names = [f"{value.name}_{part}" for part in ("detached", "count", "any", "kept")]
    while any(name in known for name in names):
        names = [f"{name}_" for name in names]
    detached, count, some, kept = names
    x = Ref(value.name)
    steps: list[tuple[str, str, tuple[Any, ...]]] = [
        ("method", "detach", (x,)),
        ("method", "numel", (x,)),
        ("function", "operator.ne", (Ref(count), 0)),
        ("function", "operator.getitem", ((Ref(detached), x), Ref(some))),
    ]
    for name in (count, some):
        known[name] = Value(name, (), "container", producer=name)
    known[detached] = replace(value, name=detached, requires_grad=False, producer=detached)
    known[kept] = replace(value, name=kept, producer=kept)
    return [beside(op, name, *step) for name, step in zip(names, steps, strict=True)]
