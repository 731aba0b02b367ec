"""Conversions between the layouts that a value has over the parts of a stage:

    spread   whole -> whole, of which every part uses its own share: gradients are summed
    total    what parts have to be summed -> the sum, whole
    gather   split -> whole; with spread=True its gradients are summed
    own      whole -> split
    scatter  what parts have to be summed -> the sum, split
    swap     split along one dimension -> split along another
    unshard  weight that is split at rest -> whole, as autocast casts it; its gradients are summed

Backward does the opposite.  A split dimension is `runs` equal runs, of which each part has an
equal share: runs=3 for a fused qkv.  `vocabulary_…` are for tables and logits of which parts have
shares of the vocabulary, `mean_cross_entropy` for those of which they have shares of the rows,
`own_grouped_mm` for experts; `scaled_dot_product_attention` drops out what the whole would.

Parts are processes of a group (`Group`), or take turns in one process (`pdcompile.parts.turns`).
This file needs torch alone: written stages carry it along.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def _as_of_torch(function: Function) -> Function:
    """Let modes that follow the functions of torch follow this one."""

    @functools.wraps(function)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(x):
            return handle_torch_function(call, (x,), x, *args, **kwargs)
        return function(x, *args, **kwargs)

    return call  # type: ignore[return-value]


@_as_of_torch
def spread(x: Tensor) -> Tensor:
    """The same value; its gradient is the sum of those of all parts."""
    return _convert(x, "spread", ("keep",), ("sum",))


@_as_of_torch
def total(x: Tensor) -> Tensor:
    """The sum of what the parts have."""
    return _convert(x, "total", ("sum",), ("keep",))


@_as_of_torch
def gather(x: Tensor, dim: int, *, runs: int = 1, spread: bool = False) -> Tensor:
    """The whole of a value that is split along a dimension; `spread`: as after `spread`."""
    back = ("scatter" if spread else "own", dim, runs)
    return _convert(x, "gather", ("gather", dim, runs), back)


@_as_of_torch
def own(x: Tensor, dim: int, *, runs: int = 1) -> Tensor:
    """This part's share of a whole value along a dimension."""
    return _convert(x, "own", ("own", dim, runs), ("gather", dim, runs))


@_as_of_torch
def scatter(x: Tensor, dim: int, *, runs: int = 1) -> Tensor:
    """This part's share, along a dimension, of the sum of what the parts have."""
    return _convert(x, "scatter", ("scatter", dim, runs), ("gather", dim, runs))


@_as_of_torch
def swap(x: Tensor, old: int, new: int, *, old_runs: int = 1, new_runs: int = 1) -> Tensor:
    """The value split along the dimension `new`, from one that is split along `old`."""
    back = ("swap", new, new_runs, old, old_runs)
    return _convert(x, "swap", ("swap", old, old_runs, new, new_runs), back)


@_as_of_torch
def unshard(x: Tensor, dim: int, *, runs: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    """The whole of a weight of which each part holds a slice, as `gather` gives it; in a context of
    `resharding` it is gathered again where a backward needs it.

    `dtype`: the one that autocast would cast the whole to; gradients are summed in the weight's.
    """
    there = ("gather", dim, runs, 0, 1, dtype)
    whole = _convert(x, "unshard", there, ("scatter", dim, runs, 0, 1, x.dtype))
    if (known := getattr(thread, "unsharded", None)) is not None:
        storage = whole.untyped_storage()
        known[storage._cdata] = weakref.ref(storage), x.detach(), At("unshard", "backward", *there)
    return whole


@contextmanager
def resharding(hook: Callable[..., Any] = lambda hook: hook) -> Iterator[None]:
    """Context of a forward of which autograd keeps no weight that `unshard` has made; `hook` wraps
    its hooks on saved tensors."""
    known: dict[int, tuple[Any, Tensor, At]] = {}
    thread.unsharded = known

    def pack(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        alive, own, at = known.get(storage._cdata, (lambda: None, tensor, None))
        if at is None or alive() is None:
            return tensor.detach()
        made = own.dtype if at.dtype is None else at.dtype
        if (
            tensor.dtype != made or tensor.is_conj() or tensor.is_neg()
        ):  # strides alone make no view of another type
            return tensor.detach()  # what its own node keeps would never die
        return own, at, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        own, at, *view = kept
        return _run(at, own, here()).as_strided(*view)

    try:
        with torch.autograd.graph.saved_tensors_hooks(hook(pack), hook(unpack)):
            yield
    finally:
        thread.unsharded = None


@_as_of_torch
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, split: int | None = None, runs: int = 1,
) -> Tensor:  # fmt: skip
    """Attention whose weights are split along a dimension (None: along none of theirs).

    Written out: kernels draw by the sizes that they are given.  Sums are in another order.
    """
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(times, -3) for one in (key, value))
    scores = query @ key.transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    counts = [here().count if dim == split else 1 for dim in range(weights.dim())]
    kept = F.dropout(torch.ones_like(weights).repeat(counts), dropout_p)
    return (weights * (kept if split is None else own(kept, split, runs=runs))) @ value


@_as_of_torch
def own_grouped_mm(x: Tensor, weight: Tensor, *, offs: Tensor, out_dtype: Any = None) -> Tensor:
    """This part's share of a sum: rows of its own experts, zeros for all others.

    Own rows come first: for rows of no group `F.grouped_mm` gives what lay in memory, also back.
    """
    ends = F.pad(offs, (1, 0))[here().part * len(weight) :][: len(weight) + 1]
    first, rows = ends[0], torch.arange(len(x), device=x.device)
    others = (rows >= ends[-1] - first).unsqueeze(-1)
    own = x[(rows + first) % len(x)].masked_fill(others, 0)
    found = F.grouped_mm(own, weight, offs=ends[1:] - first, out_dtype=out_dtype)
    return found.masked_fill(others, 0)[(rows - first) % len(x)]


@_as_of_torch
def vocabulary_embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """This part's share of a sum: the rows of its own share of a table, zeros for all other ids."""
    rows, others = _own_numbers(ids, len(weight))
    if padding_idx is not None:
        padding_idx = padding_idx % (here().count * len(weight)) - here().part * len(weight)
        padding_idx = padding_idx if 0 <= padding_idx < len(weight) else None
    return F.embedding(rows, weight, padding_idx).masked_fill(others.unsqueeze(-1), 0)


@_as_of_torch
def vocabulary_cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Cross entropy, whole, of logits that are split along classes; targets are numbers of classes.

    Parts exchange three numbers a row, not its logits: the greatest, the sum of exponentials, and
    the logit of the target from the part that has it.
    """
    dim, kept = min(1, logits.dim() - 1), target != ignore_index
    logits, dtype = _in_single(logits)
    classes = logits.shape[dim] * here().count
    greatest = gather(logits.detach().amax(dim, keepdim=True), dim).amax(dim, keepdim=True)
    logits = logits - greatest
    own, others = _own_numbers(target.masked_fill(~kept, 0), logits.shape[dim])
    found = logits.gather(dim, own.unsqueeze(dim)).squeeze(dim).masked_fill(others, 0)
    sums = [logits.exp().sum(dim), found] + [logits.sum(dim)] * (label_smoothing > 0)
    exponentials, found, *rest = total(torch.stack(sums)).unbind()
    loss = exponentials.log() - found
    if rest:
        smooth = exponentials.log() - rest[0] / classes
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    loss = loss.masked_fill(~kept, 0)
    if reduction != "none":
        loss = loss.sum() / kept.sum() if reduction == "mean" else loss.sum()
    return loss.to(dtype)


@_as_of_torch
def mean_cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Cross entropy, the mean over the rows of all parts: their sums and counts are summed."""
    logits, dtype = _in_single(logits)
    loss = F.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    kept = (target != ignore_index).sum()
    found, count = total(torch.stack([loss, kept.to(loss.dtype)])).unbind()
    return (found / count).to(dtype)


def _in_single(logits: Tensor) -> tuple[Tensor, torch.dtype]:
    """Logits, half precision as single in which sums do not overflow, and the dtype of a loss."""
    if logits.dtype not in (torch.float16, torch.bfloat16):
        return logits, logits.dtype
    autocast = torch.is_autocast_enabled(logits.device.type)
    return logits.float(), torch.float32 if autocast else logits.dtype


def _own_numbers(ids: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Ids as numbers in this part's share of the vocabulary, and which are another's (0).

    What is no id of the whole is out of range on every part, so that all fail as torch does.
    """
    others = (ids >= 0) & (ids < own * here().count) & (ids // own != here().part)
    return (ids - own * here().part).masked_fill(others, 0), others


@dataclass(frozen=True, slots=True)
class At:
    """A conversion, or the backward of one, and where it is called.

    `kind` is what the parts do; `dim` is split, or becomes split (swap: `new`).
    """

    name: str
    place: str = field(compare=False)
    kind: str
    dim: int = 0
    runs: int = 1
    new: int = 0
    new_runs: int = 1
    dtype: torch.dtype | None = None  # that a value is cast to before

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


class Alone:
    """One part among `count`, which takes all others to have what it has: for shapes and times."""

    def __init__(self, count: int, part: int = 0) -> None:
        self.part, self.count = part, count

    def meet(self, x: Tensor, at: At) -> Tensor:
        """This part's result of a conversion, for which it gives x and the others theirs.

        The result is the sum of what all give, the stack of it ("gather"), or of stacks with an
        item for each part the sum ("scatter") or the stack ("swap") of this part's items.
        """
        return result_of(at.kind, [x] * self.count, self.part)


def result_of(kind: str, given: Sequence[Tensor], part: int) -> Tensor:
    """Give a part its result of the collective; sums are always in the order of parts."""
    if kind in ("scatter", "swap"):
        given = [one[part] for one in given]
    if kind in ("gather", "swap"):
        return torch.stack([*given])
    first = given[0].clone(memory_format=torch.contiguous_format)
    return functools.reduce(Tensor.add_, given[1:], first)


class Group(Alone):
    """A process of a group (None: of all processes), whose ranks are the parts in order."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_world_size(group), dist.get_rank(group))
        self._group = dist.group.WORLD if group is None else group

    def meet(self, x: Tensor, at: At) -> Tensor:
        result, work = begun(self._group, x.contiguous(), at.kind, self.count)
        work.wait()
        return result


def begun(group: Any, x: Tensor, kind: str, count: int) -> tuple[Tensor, Any]:
    """The memory of a result of `Alone.meet`, and the work of a group that fills it."""
    match kind:
        case "sum":
            result = x.clone()
            return result, group.allreduce([_real(result)])
        case "gather":
            result = x.new_empty((count, *x.shape))
            return result, group._allgather_base(_bytes(result), _bytes(x))
        case "scatter":
            result = x.new_empty(x.shape[1:])
            return result, group._reduce_scatter_base(_real(result), _real(x).flatten(0, 1))
    result = torch.empty_like(x)
    return result, group.alltoall_base(_bytes(result), _bytes(x), [], [])


def _bytes(x: Tensor) -> Tensor:
    """View a tensor as bytes to move it: libraries do not know every dtype."""
    return x.flatten().view(torch.uint8)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


thread = threading.local()  # .parts, in a thread of `in_turns`
_process: list[Alone] = []  # of this process, where it is one part


def here() -> Alone:
    """The part that is running."""
    found: Alone | None = getattr(thread, "parts", None) or (_process[-1] if _process else None)
    if found is None:
        raise RuntimeError(
            "this stage is one of several parts, and nothing says which: run it by in_turns(...), "
            "or in `with using(Group(group))`"
        )
    return found


@contextmanager
def using(parts: Alone) -> Iterator[None]:
    """Context in which this process is one part; backward belongs in it too."""
    _process.append(parts)
    try:
        yield
    finally:
        _process.pop()


def _run(at: At, x: Tensor, parts: Alone) -> Tensor:
    x = x if at.dtype is None else x.to(at.dtype)
    match at.kind:
        case "sum":
            return parts.meet(x, at)
        case "gather":
            return _join(parts.meet(x, at), at)
        case "own":
            return _cut(x, at.dim, at.runs, parts.count, at)[parts.part].contiguous()
        case "scatter":
            return parts.meet(_cut(x, at.dim, at.runs, parts.count, at), at)
        case "swap" if (at.dim - at.new) % x.dim() == 0:  # there is no other one to cut along
            whole = _run(replace(at, kind="gather"), x, parts)
            return _run(replace(at, kind="own", runs=at.new_runs), whole, parts)
        case "swap":
            return _join(parts.meet(_cut(x, at.new, at.new_runs, parts.count, at), at), at)
    return x


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: At, back: At) -> Tensor:
        ctx.there, ctx.back = there, back
        y = _run(there, x, here())
        return x.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _apply(gradients[0], ctx.back, ctx.there), None, None


def _apply(x: Tensor, there: At, back: At) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Conversion.apply(x, there, back)  # type: ignore[no-any-return,no-untyped-call]
    return _run(there, x, here())


def _convert(x: Tensor, name: str, there: tuple[Any, ...], back: tuple[Any, ...]) -> Tensor:
    caller = sys._getframe(2)
    while caller.f_code.co_filename in _SKIPPED and caller.f_back is not None:
        caller = caller.f_back
    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    return _apply(x, At(name, place, *there), At(f"the backward of {name}", place, *back))


_SKIPPED = (__file__, torch.overrides.__file__)  # on the way from a stage's line to a conversion


def _cut(x: Tensor, dim: int, runs: int, count: int, at: At) -> Tensor:
    """The stack of all parts' shares of x along a dimension."""
    dim %= x.dim()
    if x.shape[dim] % (runs * count):
        raise ValueError(
            f"{at}: dimension {dim} of {list(x.shape)} does not divide into {runs} runs of {count} "
            "parts"
        )
    each = x.shape[dim] // (runs * count)
    shares = x.view(*x.shape[:dim], runs, count, each, *x.shape[dim + 1 :])
    return shares.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def _join(stack: Tensor, at: At) -> Tensor:
    """The whole of a stack of shares along a dimension."""
    dim = at.dim % (stack.dim() - 1)
    shape = stack.shape
    shares = stack.view(*shape[: dim + 1], at.runs, shape[dim + 1] // at.runs, *shape[dim + 2 :])
    return shares.movedim(0, dim + 1).flatten(dim, dim + 2)
