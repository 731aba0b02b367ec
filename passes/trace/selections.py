"""Selections: results whose size depends on values, such as rows that a mask chooses.

Fake tensors have no values, so such a size is made up.  No other computation may depend on it: the
model is recorded with several sizes, none and all rows among them, and has to run the same
operators with the same arguments.  The dims that varied are then marked.  Python may pass such a
number on (``torch.arange(chosen.shape[0])``): an argument that is in each recording the size of the
same dimension of the same earlier value becomes that size, by an op ``size``.

Packed sequences are such results: `pack_padded_sequence` is Python around one operator.  A
recurrent layer on them is recorded as the operator that torch calls with its weights.  Torch has no
shape rules on fake tensors for this one, the one that pads again and `ctc_loss`: they are here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pdcompile.errors import TraceError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Op, OpGraph, Ref, Value, walk
from pdcompile.passes.trace.batch_sizes import merged
from pdcompile.passes.trace.tape.observer import storage_key
from pdcompile.passes.trace.tape.results import beside

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording

Policy = Callable[[int, int], int]  # (number of earlier selections, elements of the mask) -> size
_all: Policy = lambda index, elements: elements  # noqa: E731

_aten = torch.ops.aten
_PACK = _aten._pack_padded_sequence.default
_CHOOSES = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default,
            _aten._index_put_impl_.default)  # fmt: skip


class Selections:
    """Runs the ATen ops that choose by values, with made-up sizes.

    Args:
        policy: the made-up size of each choice.
        place: returns the path of the running module.
    """

    def __init__(self, policy: Policy, place: Callable[[], str]) -> None:
        self._policy, self._place = policy, place
        self._sizes: dict[tuple[Any, ...], int] = {}  # mask -> elements found
        self._kept: list[Tensor] = []
        self.found: list[tuple[str, int]] = []  # (place, elements of the mask)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result; None where it does not choose by values."""
        if func is _PACK:
            return self._packed(*args)
        if func is _aten.repeat_interleave.Tensor:
            return args[0].new_empty((self._size(args[0]),))
        if func is _aten.nonzero.default:
            return self._indices(args[0])
        if func is _aten.masked_select.default:
            tensor, mask = args
            elements = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
            times = math.prod(elements) // max(mask.numel(), 1)
            return tensor.new_empty((self._size(mask) * times,))
        if func not in _CHOOSES or not any(map(_is_mask, args[1])):
            return None
        indices: list[Any] = []
        for index in args[1]:
            indices += self._indices(index).unbind(1) if _is_mask(index) else [index]
        return func(args[0], indices, *args[2:], **kwargs)

    def _indices(self, mask: Tensor) -> Tensor:
        return mask.new_empty((self._size(mask), mask.dim()), dtype=torch.int64)

    def _packed(self, padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """The steps of all samples one after the other, and the batch size of each step."""
        every, most = padded.shape[0] * padded.shape[1], padded.shape[1 if batch_first else 0]
        # A place for each, which shares its elements with no other choice.
        steps = max(self._made_up(every, f"{self._place()} {len(self.found)}"), 1)
        longest = max(self._made_up(most, f"{self._place()} {len(self.found)}"), 1)
        return padded.new_empty((steps, *padded.shape[2:])), lengths.new_empty((longest,))

    def _size(self, mask: Tensor) -> int:
        # Equal for the same part of the same memory, unless written in between.
        part = mask.storage_offset(), tuple(mask.shape), mask.stride()
        key = storage_key(mask), mask._version, *part
        if key not in self._sizes:
            self._kept.append(mask)
            self._sizes[key] = self._made_up(mask.numel(), self._place())
        return self._sizes[key]

    def _made_up(self, elements: int, place: str) -> int:
        size = self._policy(len(self.found), elements)
        self.found.append((place, elements))
        return size


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of the recordings of one mode at the first batch size."""

    sizes: list[int]  # expected size of each choice, which it has at every batch size
    #: dims that vary, by value; None until they are known, or where sizes are arguments of ops
    dims: dict[str, tuple[int, ...]] | None = None
    most: int = 0  # elements of the largest inputs with which everything was chosen

    def usual(self, index: int, elements: int) -> int:
        return self.sizes[index] if index < len(self.sizes) else elements


def with_made_up_sizes(
    run: Callable[[Policy], Recording], proofs: dict[bool, Proof], training: bool, elements: int
) -> Recording | None:
    """A recording with expected sizes; None if the computation depends on what they are.

    Args:
        run: records the model with these sizes.
        proofs: of each mode, filled in.
        elements: of the inputs.
    """
    known = proofs.get(training)
    try:
        if known is not None and known.dims is not None:
            usual = run(known.usual)
            # Choices of one row, or of none, are no others at another batch size.
            if elements > known.most and not _same([usual, run(_all)]):
                return None
            proofs[training] = replace(known, most=max(elements, known.most))
            return _varying(usual, known.dims)
        everything = run(_all)
        if not everything.chosen:
            return everything
        known = proofs.setdefault(training, Proof(_expected(everything.chosen)))
        found = [run(known.usual), everything, run(lambda index, elements: 1)]
        found.append(run(lambda index, elements: 0))
        alike = _same(found)
        if not alike:
            # Another size for every choice, so that sizes are not mistaken for each other.
            found.append(run(lambda index, elements: elements // 2 + 1 + index))
    except TraceError:
        return None
    opened = found if alike else _with_open_sizes(found)
    if opened is None or not _same(opened) or (dims := _varying_dims(opened)) is None:
        return None
    proofs[training] = replace(known, dims=dims if alike else None, most=elements)
    return _varying(opened[0], dims)


def _expected(chosen: Sequence[tuple[str, int]]) -> list[int]:
    """Average sizes, if choices of one module share their elements, as experts share tokens."""
    counts = Counter(place for place, _ in chosen)
    return [max(-(-elements // counts[place]), 2) for place, elements in chosen]


def _same(recordings: Sequence[Recording]) -> bool:
    """True if the same operators ran, with the same arguments."""
    runs = [(r.returned, [replace(op, variable="") for op in r.graph.ops]) for r in recordings]
    return all(each == runs[0] for each in runs)


def _varying(recording: Recording, dims: dict[str, tuple[int, ...]]) -> Recording:
    graph = recording.graph
    values = {n: replace(v, varies=dims.get(n, ())) for n, v in graph.values.items()}
    return replace(recording, graph=replace(graph, values=values))


def _varying_dims(recordings: Sequence[Recording]) -> dict[str, tuple[int, ...]] | None:
    """The dims that vary, by value; None where values differ in more than sizes, or where one that
    varies is returned."""
    found = {}
    for name in recordings[0].graph.values:
        versions = [each.graph.values[name] for each in recordings]
        if len({(len(v.shape), v.dtype, v.requires_grad) for v in versions}) > 1:
            return None
        sizes = enumerate(zip(*(v.shape for v in versions), strict=True))
        found[name] = tuple(dim for dim, each in sizes if len(set(each)) > 1)
    return None if any(found[ref.name] for ref in walk(recordings[0].returned, Ref)) else found


def _with_open_sizes(recordings: Sequence[Recording]) -> list[Recording] | None:
    """The recordings with ops that ask for sizes; None where they differ otherwise."""
    graphs = [each.graph for each in recordings]
    if len({len(graph.ops) for graph in graphs}) > 1:
        return None
    sizes = _OpenSizes([graph.values for graph in graphs])
    try:
        for ops in zip(*(graph.ops for graph in graphs), strict=True):
            sizes.enter(ops)
    except LookupError:
        return None
    made = {op.name for op in sizes.made}

    def opened(graph: OpGraph) -> OpGraph:
        values = {name: value for name, value in graph.values.items() if name not in made}
        values |= {op.name: (graph.values | sizes.new)[op.name] for op in sizes.made}
        return replace(graph, ops=tuple(sizes.made), values=values)

    return [replace(each, graph=opened(each.graph)) for each in recordings]


class _OpenSizes:
    """One list of ops for those of recordings at different sizes, with ops that ask for sizes."""

    def __init__(self, values: list[dict[str, Value]]) -> None:
        self._values = values  # of each recording
        self.made: list[Op] = []
        self.new: dict[str, Value] = {}  # the sizes
        self._known: dict[tuple[str, int], Ref] = {}

    def enter(self, ops: Sequence[Op]) -> None:
        """Enters one op for the same op at all sizes."""
        plain = [replace(op, variable="", args=(), kwargs=()) for op in ops]
        if any(each != plain[0] for each in plain):
            raise LookupError
        parts = [(op.args, op.kwargs) for op in ops]
        args, kwargs = merged(parts, lambda leaves: self._leaf(leaves, ops[0]))
        self.made.append(replace(ops[0], args=args, kwargs=kwargs))

    def _leaf(self, parts: Sequence[Any], op: Op) -> Any:
        kinds = {*map(type, parts)}
        if len(kinds) == 1 and all(part == parts[0] for part in parts):
            return parts[0]
        if kinds != {int}:
            raise LookupError
        where = name, dim = self._where(tuple(parts), op)
        if where not in self._known:
            new = f"{name}_size"
            while new in self.new or new in self._values[0]:
                new += "_"
            args, index = (Ref(name), dim), len(self.new)
            self.made.append(beside(op, new, "method", "size", args, call_index=index))
            self.new[new] = Value(new, (), "container", producer=new)
            self._known[where] = Ref(new)
        return self._known[where]

    def _where(self, numbers: tuple[int, ...], op: Op) -> tuple[str, int]:
        """The first value that has this size in all recordings, if possible one that op reads."""
        made = [each.name for each in self.made]
        for name in (*(name for name in op.inputs if name in made), *made):
            shapes = [values[name].shape for values in self._values if name in values]
            if len(shapes) == len(numbers):
                for dim, found in enumerate(zip(*shapes, strict=False)):
                    if found == numbers:
                        return name, dim
        raise LookupError


_STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
_MEMBERS = 9  # arguments of such a call with batch sizes, all positional
_LENGTHS = 4  # of ctc_loss: the lengths of labels are the last positional argument


def takes_packed(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """True if a recurrent layer is called with a packed sequence."""
    given = args[0] if args else kwargs.get("input")
    return isinstance(module, nn.RNNBase) and isinstance(given, PackedSequence)


class Packed:
    """The packed sequences of one recording."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}  # id of batch sizes -> samples that were packed
        self._kept: list[Tensor] = []

    def made(self, func: Any, args: Any, result: Any) -> None:
        """Remembers, after a call of the model, how many samples it packed."""
        if getattr(func, "__name__", "") == "_pack_padded_sequence" and len(args) == 3:
            self._kept.append(result[1])
            self._samples[id(result[1])] = args[0].shape[0 if args[2] else 1]

    def result(self, func: Any, args: Any, kwargs: Any, module: nn.Module | None) -> Any:
        """The result on fakes of a call on packed sequences; None for other calls.

        `module` is the running one.
        """
        name = getattr(func, "__name__", "")
        if func is F.ctc_loss and len(args) == _LENGTHS and isinstance(args[3], Tensor):
            logs = args[0]
            shape = logs.shape[1:-1] if kwargs.get("reduction") == "none" else ()
            return _like(logs, shape, [logs], torch.promote_types(logs.dtype, torch.float32))
        # The form without batch sizes has as many arguments, but a bool (biases) as the fourth.
        if name in _STATES and len(args) == _MEMBERS and not isinstance(args[3], bool):
            return _recurrent(name, args)
        if name == "_pad_packed_sequence" and id(args[1]) in self._samples:
            return self._padded(args)
        if name == "__getitem__" and isinstance(module, nn.RNNBase) and args[1:] == (0,):
            # Batch size of the first step: all samples, because no length is zero.
            return self._samples.get(id(args[0]))
        return None

    def _padded(self, args: Any) -> tuple[Tensor, Tensor]:
        data, batch_sizes, batch_first, _, longest = args
        samples = self._samples[id(batch_sizes)]
        dims = (samples, longest) if batch_first else (longest, samples)
        return _like(data, (*dims, *data.shape[1:]), [data]), batch_sizes.new_empty((samples,))


def _recurrent(name: str, args: Any) -> tuple[Tensor, ...]:
    data, _, states, weights, *_, both_ways = args
    states = list(states) if isinstance(states, tuple | list) else [states]
    sources = [data, *states, *weights]
    width, dtype = states[0].shape[-1] * (2 if both_ways else 1), _dtype(name, data)
    return (
        _like(data, (data.shape[0], width), sources, dtype),
        *(_like(state, state.shape, sources, dtype) for state in states[: _STATES[name]]),
    )


def _dtype(name: str, data: Tensor) -> torch.dtype:
    """The dtype of what a recurrent layer makes of these numbers, where an autocast region may be
    open: cuDNN has its own, and on the CPU the plain cells alone are cast."""
    kind = data.device.type
    if not torch.is_autocast_enabled(kind) or data.dtype == torch.float64:
        return data.dtype
    if not devices.is_host(data.device):
        return torch.float16
    return torch.get_autocast_dtype(kind) if name.startswith("rnn") else data.dtype


def _like(
    tensor: Tensor, shape: Any, sources: list[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    made = tensor.detach().new_empty(tuple(shape), dtype=dtype)
    needed = torch.is_grad_enabled() and any(source.requires_grad for source in sources)
    # A result is not a leaf: the model may write into it.
    return made.requires_grad_().clone() if needed else made
