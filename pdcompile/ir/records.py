"""The records that an OpGraph consists of: ops, their arguments, values, tensors, costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, TypeAlias

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4,
    "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip

# A stage in parts imports its conversions from the file of this name, which dumped stages carry.
PARTS = "pdcompile_parts"
TURNS = "pdcompile_turns"  # beside it, for the parts of one process
UNSHARD = f"{PARTS}.unshard"
CONVERSIONS = frozenset((UNSHARD, *(
    f"{PARTS}.{name}" for name in ("spread", "total", "gather", "own", "scatter", "swap")
)))  # fmt: skip
FROM_PARTS = CONVERSIONS | {f"{PARTS}.{name}" for name in (
    "scaled_dot_product_attention", "vocabulary_embedding", "vocabulary_cross_entropy",
    "mean_cross_entropy", "own_grouped_mm")}  # fmt: skip
CHECK = "torch._assert"  # `pdcompile.ir.value_checks`: raises where its first argument is false
GRADIENT = "torch.autograd.grad"


@dataclass(frozen=True, slots=True)
class Affine:
    """A number that depends on the microbatch size b: ``scale * b / over + offset`` (scale != 0).

    `over`: parts of a stage that share samples; b is a multiple of it.
    """

    scale: int
    offset: int = 0
    over: int = 1

    def at(self, b: int) -> int:
        return self.scale * b // self.over + self.offset

    def __str__(self) -> str:
        term = "b" if self.scale == 1 else f"{self.scale}*b"
        term += f"/{self.over}" * (self.over > 1)
        return term if not self.offset else f"{term}{self.offset:+d}"


Size: TypeAlias = int | Affine


def size_at(size: Size, b: int) -> int:
    """The number that a size is for microbatch size b."""
    return size.at(b) if isinstance(size, Affine) else size


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value: a graph input or the output of an earlier op."""

    name: str


@dataclass(frozen=True, slots=True)
class Attr:
    """An argument that is a tensor of the model (parameter, buffer or constant), by FQN.

    Tied parameters have one canonical FQN, the first in `model.named_parameters()`.
    """

    fqn: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A leaf of the output that training steps do not give: the value of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchLiteral:
    """A dtype, device, layout or memory format: ``TorchLiteral("dtype", "float32")``.

    The device that the model runs on is ``TorchLiteral("device", "self")``: never baked in.
    """

    kind: Literal["dtype", "device", "layout", "memory_format"]
    text: str


@dataclass(frozen=True, slots=True)
class ListOf:
    """A Python list among the arguments (a tuple stays a tuple: indexing tells them apart)."""

    items: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """``start:stop:step`` in an index."""

    start: Argument = None
    stop: Argument = None
    step: Argument = None


@dataclass(frozen=True, slots=True)
class DictOf:
    """A dict with string keys among the arguments or in the output."""

    items: tuple[tuple[str, Argument], ...]


# The types of an op's argument.  Any stands for Ellipsis.
Argument: TypeAlias = (
    bool | int | float | complex | str | Affine | Ref | Attr | LeftOut | TorchLiteral
    | ListOf | DictOf | Slice | tuple[Any, ...] | Any | None
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of one op for one microbatch of `microbatch_size` samples.

    Seconds are of the reference device (speed 1). `saved_bytes` is what this op newly saves
    for backward: storages that an earlier op saved already are not counted again, parameters
    and stage inputs never. `origin` says where the numbers come from.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    flops: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    output_bytes: int = 0
    workspace_bytes: int = 0
    microbatch_size: int = 1
    origin: Literal["measured", "estimated", "imported"] = "estimated"


@dataclass(frozen=True)
class Op:
    """One operator.

    kind and target: ``function`` (target ``torch.nn.functional.linear``, ``operator.add``),
    ``method`` (target ``view``: args[0] is the tensor), ``getattr`` (args[0] is the tensor,
    target the property), ``module`` (a torch.nn leaf; target is the qualified class name and
    `module_path` the leaf's FQN), ``opaque`` (a module of the user, run as it is).

    An op has exactly one output value, named like the op; a container (tuple of torch.split,
    of an LSTM) is a value too, taken apart by ``operator.getitem`` ops on the same stage.
    """

    name: str  # a Python identifier, unique in the graph, chosen by us
    kind: Literal["function", "method", "getattr", "module", "opaque"]
    target: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    module_path: str = ""  # FQN of the innermost running module ("" is the root)
    call_index: int = 0  # how many earlier ops have the same (module_path, target)
    module_call: int = 0  # which call of that module this is, for modules called repeatedly
    source: str = "<no source>"  # "file.py:12" in the user's code
    variable: str = ""  # of the user, that receives the result: "x", or "q, (k, v)" for parts
    parameters: tuple[str, ...] = ()  # canonical FQNs read, leaf modules' included
    buffers_read: tuple[str, ...] = ()
    buffers_written: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()  # values whose storage this op writes in place
    draw: int | None = None  # index of this random draw within module_path; None: not random
    region: Literal["forward", "loss"] = "forward"  # "loss": belongs to loss_fn, not the model
    grad_enabled: bool = True
    aside: bool = False  # only outputs need it: the last stage runs it beside what is planned
    enables_grad: bool = False  # recorded for autograd although the run as a whole is not
    autocast: str | None = None  # "cpu:bfloat16" inside an autocast region that the model opens
    constructor: tuple[tuple[str, Argument], ...] = ()  # module kind: explicit __init__ arguments
    # Opaque kind, found by running it once for real: the form of what it returns
    # (`pdcompile.ir.opaque.describe`), forward hooks in it, floating-point operations, bytes
    # kept for backward, buffers that it writes by binding new tensors to their names.
    returns: str = ""
    hooks: tuple[str, ...] = ()
    flops: Size | None = None
    saved_bytes: Size | None = None
    rebinds: tuple[str, ...] = ()
    cost: OpCost | None = None

    @property
    def opaque(self) -> bool:
        """True if it is a module of the user that runs as it is."""
        return self.kind == "opaque"

    @property
    def scope(self) -> str:
        """FQN of the module whose forward contains the op's call (a leaf's parent)."""
        leaf = self.kind in ("module", "opaque")
        return self.module_path.rpartition(".")[0] if leaf else self.module_path

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that the op reads, each once, in order of appearance."""
        return tuple(dict.fromkeys(ref.name for ref in walk((self.args, self.kwargs), Ref)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The name of its one output, for code that treats calls of blocks alike."""
        return (self.name,)

    @cached_property
    def attributes(self) -> tuple[str, ...]:
        """FQNs that the op reads as arguments (leaf modules' own tensors not among them)."""
        return tuple(dict.fromkeys(attr.fqn for attr in walk((self.args, self.kwargs), Attr)))

    @property
    def used_tensors(self) -> tuple[str, ...]:
        """FQNs of every tensor of the model that the op reads or writes, each once."""
        named = (*self.parameters, *self.attributes, *self.buffers_read, *self.buffers_written)
        return tuple(dict.fromkeys(named))


def written_buffers(ops: Iterable[Op]) -> frozenset[str]:
    """FQNs of the buffers that some of these ops write."""
    return frozenset(fqn for op in ops for fqn in op.buffers_written)


@dataclass(frozen=True, slots=True)
class Value:
    """A value that an op produces or the graph receives.

    `storage` is equal for values that share memory (views, in-place results). A container has
    ``dtype == "container"`` and shape ().
    `needs_gradient`: requires grad, and the loss depends on it through differentiable ops.
    `stride_order`: dims from largest to smallest stride for dense layouts, () when contiguous.
    `varies`: dims whose size depends on values (rows that a mask chooses); in `shape` they have
    the size to be expected at the capture's microbatch size.  Such values never leave a stage.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    requires_grad: bool = False
    needs_gradient: bool = False
    producer: str | None = None  # None: a graph input
    consumers: tuple[str, ...] = ()
    storage: int = -1
    stride_order: tuple[int, ...] = ()
    varies: tuple[int, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.dtype != "container"

    def bytes(self, b: int) -> int:
        """Size in bytes for microbatch size b (0 for a container: its items are counted)."""
        if not self.is_tensor:
            return 0
        return DTYPE_BYTES[self.dtype] * prod(size_at(size, b) for size in self.shape)


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor that the caller passes in: value `name`, reached by `path` in the call.

    Paths are those of `pdcompile.batch.flatten_call`: ``x``, ``batch['ids']``, ``args[1]``,
    ``target``, ``target[0]``.
    """

    name: str
    path: str
    batch_dim: int | None  # None: the same for every microbatch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A parameter, buffer or constant of the model.

    `aliases` are further names of the same tensor (tied weights); `persistent` is False for
    buffers that state_dict leaves out; kind ``constant`` is a tensor that forward refers to
    without its being registered (closed over, or a plain attribute).
    """

    fqn: str
    kind: Literal["parameter", "buffer", "constant"]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Microbatch sizes for which a capture was found to be the model; None: no upper end.

    `below` and `above` name the first difference outside, "" where no other size was tried.
    `multiple`: parts of a stage that share samples, equally many each.
    """

    smallest: int = 1
    largest: int | None = None
    below: str = ""
    above: str = ""
    multiple: int = 1

    @property
    def is_one(self) -> bool:
        """True if it is one size alone."""
        return self.smallest == self.largest

    def holds(self, size: int) -> bool:
        """True if a microbatch may have this many samples."""
        fits = self.smallest <= size and (self.largest is None or size <= self.largest)
        return fits and size % self.multiple == 0

    def holds_parts(self, size: int, count: int) -> bool:
        """True if a minibatch of this size may be cut into so many microbatches."""
        return self.holds(size // count) and self.holds(-(-size // count))

    def count(self, size: int, wanted: int, *, more: bool) -> int:
        """Number of microbatches of a minibatch of this size: as many as are wanted, or as few less
        as it may be cut into, or `more`."""
        most = min(wanted, size)
        if self.holds_parts(size, most):
            return wanted
        fitting = (m for m in range(1, (size if more else most) + 1) if self.holds_parts(size, m))
        return min(fitting, key=lambda m: abs(m - wanted), default=wanted)


_PLAIN = frozenset((Ref, Attr, LeftOut, str, int, float, bool, type(None)))  # hold no others


def walk(argument: Any, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
    """All parts of an argument that are of the given class or classes, in order of appearance."""
    found: list[Any] = []
    stack = [argument]
    while stack:
        part = stack.pop()
        if isinstance(part, kind):
            found.append(part)
        elif type(part) in _PLAIN:
            continue
        elif isinstance(part, tuple):
            stack.extend(reversed(part))
        elif isinstance(part, ListOf | DictOf):
            stack.extend(reversed(part.items))
        elif isinstance(part, Slice):
            stack.extend((part.step, part.stop, part.start))
    return found


def rewritten(
    argument: Any, change: Callable[[Any], Any], forms: Sequence[Any] = (ListOf, DictOf, Slice)
) -> Any:
    """The argument with `change` applied to every part that holds no other parts.

    `forms`: what its lists, dicts and slices become.
    """
    if type(argument) in _PLAIN:
        return change(argument)
    as_list, as_dict, as_slice = forms
    match argument:
        case tuple():
            return tuple(rewritten(part, change, forms) for part in argument)
        case ListOf(items):
            return as_list(rewritten(items, change, forms))
        case DictOf(items):
            return as_dict(tuple((key, rewritten(part, change, forms)) for key, part in items))
        case Slice(start, stop, step):
            return as_slice(*(rewritten(part, change, forms) for part in (start, stop, step)))
    return change(argument)


def python_value(argument: Argument, leaf: Callable[[Argument], Any]) -> Any:
    """The argument in Python's own containers, with every other part as `leaf` gives it."""
    return rewritten(argument, leaf, (list, dict, slice))


def leaves(output: Argument) -> tuple[Argument, ...]:
    """The leaves of an output in pytree order: Refs, Attrs and constants."""
    return tuple(leaf for _, leaf in named_leaves(output))


def named_leaves(output: Argument, path: str = "") -> Iterator[tuple[str, Argument]]:
    """Each leaf of an output in pytree order, with its place: ``past.layers[0].keys``."""
    match output:
        case tuple() | ListOf():
            for i, item in enumerate(output.items if isinstance(output, ListOf) else output):
                yield from named_leaves(item, f"{path}[{i}]")
        case DictOf(items):
            for key, item in items:
                named = f"{path}.{key}" if path else key
                yield from named_leaves(item, named if key.isidentifier() else f"{path}[{key!r}]")
        case _:
            yield path, output
