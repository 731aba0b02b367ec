"""BatchLayout: the dimension of each leaf that counts samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pdcompile.batch.call import DEFAULT, FlatCall, children_of, is_dim, rebuild, walk
from pdcompile.errors import ConfigError, InputError, did_you_mean
from pdcompile.releases.torch_internals import pytree


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Samples in the minibatch, and per path the dimension that counts them.

    None: the leaf is the same for every microbatch (constants, scalars, masks of size 1).
    `orders`: the order in memory of the dimensions of each tensor; tensors of further minibatches
    are brought into it.  `doubt`: why the samples may be elsewhere, so that nothing can be split.
    """

    size: int
    dims: dict[str, int | None]
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    doubt: InputError | None = field(default=None, compare=False, repr=False)

    @property
    def splits(self) -> bool:
        """True if anything is split; if not, there is one microbatch."""
        return any(dim is not None for dim in self.dims.values())

    @property
    def usual_dim(self) -> int:
        """The dimension that counts samples in most leaves."""
        dims = Counter(dim for dim in self.dims.values() if dim is not None)
        return dims.most_common(1)[0][0] if dims else 0


def resolve_batch(flat: FlatCall, batch_dims: Any = 0) -> BatchLayout:
    """Finds the batch size and each leaf's batch dimension.

    Args:
        flat: one global minibatch.
        batch_dims: an int for all; None: nothing is split; or a dict from argument names (and
            ``target``) to ints, Nones (replicated), or containers of them as far as the
            argument's own go; others keep the default 0.  Negative counts from the last dimension.

    A tensor is split along its dimension when the size there is the batch size; 0-dim tensors
    and size 1 are replicated.  The batch size is the size other than 1 that the tensors agree on.
    A list may have one element for each sample: what may be one is in doubt until batch_dims names
    its argument (`check_splits`).

    Raises:
        InputError: a tensor has another size there (its path is named), or no samples.
        ConfigError: batch_dims does not fit the call.
    """
    asked = _asked_dims(flat, batch_dims)
    doubt = list_in_doubt(flat, asked)
    orders = {p: memory_order(x) for p, x in flat.leaves.items() if isinstance(x, Tensor)}
    if batch_dims is None:
        return BatchLayout(1, dict.fromkeys(flat.leaves), orders)
    sizes: dict[str, tuple[int, int]] = {}  # path -> (dimension, size there)
    for path, dim in asked.items():
        leaf = flat.leaves[path]
        dim = 0 if dim is DEFAULT else dim
        if dim is None or not isinstance(leaf, Tensor) or leaf.ndim == 0:
            continue
        if not -leaf.ndim <= dim < leaf.ndim:
            raise InputError(
                f"batch_dims asks for dimension {dim} of {_shown(leaf)}",
                where=path,
                remedy=_remedy(flat, path),
            )
        sizes[path] = (dim % leaf.ndim, leaf.shape[dim])
    try:
        size = _common_size(flat, sizes)
    except InputError:
        if doubt is not None:
            raise doubt from None
        raise
    dims = {
        path: sizes[path][0] if path in sizes and sizes[path][1] == size else None
        for path in flat.leaves
    }
    return BatchLayout(size, dims, orders, doubt)


def follow_batch(flat: FlatCall, layout: BatchLayout) -> BatchLayout:
    """The layout of a further minibatch of the same structure: the same dimensions, its own size.

    So a replicated tensor is not mistaken for a batch in a short last minibatch.  A leaf that is
    None here (a rank that does not need it) keeps its dimension; the size is `layout`'s where no
    leaf has one.  A leaf with one row for several samples has no dimension in the result: see
    `lone_rows`.

    Raises:
        InputError: the tensors disagree on the size, have no samples, or a path is new.
    """
    sizes = {}
    for path, leaf in flat.leaves.items():
        if path not in layout.dims:
            missing = [name for name in layout.dims if name not in flat.leaves]
            raise InputError(
                f"this call has an input that the first call did not have: {path}",
                where=path,
                remedy=did_you_mean(path, missing or layout.dims)
                + "pass the same arguments in every call",
            )
        dim = layout.dims[path]
        if dim is not None and isinstance(leaf, Tensor):
            if leaf.ndim <= dim:
                raise InputError(
                    f"{_shown(leaf)} has no dimension {dim}",
                    where=path,
                    remedy="pass tensors with as many dimensions as in the first call",
                )
            sizes[path] = (dim, leaf.shape[dim])
    size = _common_size(flat, sizes) if sizes else layout.size
    dims = {
        path: layout.dims[path]
        if leaf is None or (path in sizes and sizes[path][1] == size)
        else None
        for path, leaf in flat.leaves.items()
    }
    return BatchLayout(size, dims, layout.orders)


def lone_rows(flat: FlatCall, later: BatchLayout, first: BatchLayout) -> tuple[str, ...]:
    """Inputs with a row for each sample in the first minibatch, and one for all in a later one.

    `later` is the layout of the later minibatch, from `follow_batch` or `resolve_batch`.
    """
    return tuple(
        path
        for path, dim in later.dims.items()
        if dim is None
        and first.dims.get(path) is not None
        and isinstance(flat.leaves[path], Tensor)
        and later.size > 1
    )


def lone_row_error(flat: FlatCall, path: str, size: int) -> InputError:
    """The refusal of one of `lone_rows`: eager would broadcast it, microbatches cannot."""
    return InputError(
        f"{_shown(flat.leaves[path])} has one row for {size} samples; in the first minibatch it "
        "had a row for each",
        where=path,
        remedy="expand() it to a row for each sample; or make another pipeline whose first "
        "minibatch has one row there and several elsewhere: every microbatch gets that row then",
    )


def check_splits(layout: BatchLayout, microbatches: int) -> None:
    """Raise unless the first minibatch can be split into so many microbatches.

    Raises:
        ConfigError: several, and nothing says where samples are.
        InputError: several, and samples may be the elements of a list.
    """
    if microbatches > 1 and not layout.splits:
        raise ConfigError(
            f"{microbatches} microbatches are asked for, and nothing in the minibatch has a "
            "dimension that counts samples",
            remedy="name one with batch_dims ({'x': 0} for an input x), or one microbatch",
        )
    if microbatches > 1 and layout.doubt is not None:
        raise layout.doubt


def check_batch_dims(batch_dims: Any) -> None:
    """Raises ConfigError for batch_dims that fit no call: other than dimensions in containers."""
    inside = [batch_dims]
    while inside:
        part = inside.pop()
        if isinstance(part, Mapping):
            inside.extend(part.values())
        elif isinstance(part, tuple | list) and part is not batch_dims:
            inside.extend(part)
        elif not is_dim(part):
            raise ConfigError(
                f"batch_dims={batch_dims!r} is not a valid value",
                remedy="an int, None, or a dict from argument names (and 'target') to ints, Nones "
                "and containers of them",
            )


def _asked_dims(flat: FlatCall, batch_dims: Any) -> dict[str, Any]:
    """Dimension by path: an int, None, or DEFAULT where batch_dims does not say."""
    if is_dim(batch_dims):
        return dict.fromkeys(flat.leaves, batch_dims if batch_dims != 0 else DEFAULT)
    check_batch_dims(batch_dims)
    arguments = (*flat.spec.arguments, flat.spec.target)
    known = dict.fromkeys((*(one.root for one in arguments), *flat.spec.signature.parameters))
    unknown = [str(name) for name in batch_dims if name not in known]
    if unknown:
        raise ConfigError(
            f"batch_dims names {', '.join(unknown)}, which this call does not have",
            remedy=f"known names: {', '.join(known)}",
        )
    asked: dict[str, Any] = {}
    for one in arguments:
        value, prefix = rebuild(one, flat.leaves), batch_dims.get(one.root, DEFAULT)
        asked |= {path: dim for path, _, dim in walk(value, one.root, prefix)}
    return asked


def _common_size(flat: FlatCall, sizes: dict[str, tuple[int, int]]) -> int:
    counts = Counter(size for _, size in sizes.values() if size != 1)
    # the first one seen, among equally frequent sizes
    size = counts.most_common(1)[0][0] if counts else 1
    example = next((path for path, (_, one) in sizes.items() if one == size), "")
    for path, (dim, one) in sizes.items():
        if one not in (size, 1):
            each = one // max(size, 1)
            rows = f" (of {each} rows, made flat in forward or the loss)" * (each * size == one)
            raise InputError(
                f"dimension {dim} of {_shown(flat.leaves[path])} is neither the batch size "
                f"{size} (of {example}) nor 1",
                where=path,
                remedy=f"give it {size} samples{rows}; or {_remedy(flat, path)}",
            )
    if size == 0:
        raise InputError(
            "the minibatch has no samples", where=example, remedy="skip empty minibatches"
        )
    return size


def _shown(tensor: Any) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def _remedy(flat: FlatCall, path: str) -> str:
    return (
        f"say where the samples are: batch_dims={{{flat.root(path)!r}: None}} if every "
        "microbatch needs all of it, or the number of the batch dimension in place of None"
    )


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from largest to smallest stride; the natural order where elements coincide."""
    strides = tensor.stride()
    if any(not stride and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
        return tuple(range(len(strides)))  # expanded
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def dense(tensor: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """The tensor without gaps in memory, dimensions in this order (None: its own).

    Returns the tensor itself where it has this layout already, else a copy.
    """
    if order is None or len(order) != tensor.dim():
        if tensor.is_contiguous():
            return tensor
        order = memory_order(tensor)
    permuted = tensor.permute(order)
    if permuted.is_contiguous():
        return tensor
    return permuted.contiguous().permute([order.index(dim) for dim in range(len(order))])


class _Alike(NamedTuple):
    """A list or tuple whose elements have the same structure, dtypes and numbers of dimensions."""

    path: str
    length: int
    tensors: dict[str, Tensor]


def list_in_doubt(flat: FlatCall, asked: Mapping[str, Any]) -> InputError | None:
    """The refusal of splitting a list that may have one element for each sample; None: there is
    none.

    It is in doubt where batch_dims (`asked`, by path) does not name its argument and it has as
    many elements as the other inputs have samples, or there are no other inputs to tell.
    """
    parameters = flat.spec.signature.parameters.values()
    star = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), None)
    found = [
        one
        for argument in (*flat.spec.arguments, flat.spec.target)
        for one in _alike(rebuild(argument, flat.leaves), argument.root)
        if one.path != star and all(asked[path] is DEFAULT for path in one.tensors)
    ]
    listed = {path for one in found for path in one.tensors}
    others = Counter(
        leaf.shape[dim]
        for path, leaf in flat.leaves.items()
        if path not in listed and isinstance(leaf, Tensor)
        for dim in (0 if asked[path] is DEFAULT else asked[path],)
        if dim is not None and -leaf.ndim <= dim < leaf.ndim
    )
    size = next((size for size, _ in others.most_common() if size != 1), 1)
    for one in found:
        alone = {p for other in found if other.length == one.length for p in other.tensors}
        if size == one.length if others else alone == listed:
            path, tensor = next(iter(one.tensors.items()))
            return InputError(
                f"a list of {one.length} may have one element for each sample, and microbatches "
                f"would be cut along dimension 0 of the elements ({path} has shape "
                f"{tuple(tensor.shape)})",
                where=one.path,
                remedy="samples: stack them to one tensor with a row for each, padded where they "
                "differ (unbind() takes it apart in forward), or microbatches=1 with "
                "batch_dims=None; rows of every element: "
                f"batch_dims={{{flat.root(path)!r}: 0}}",
            )
    return None


def _alike(value: Any, path: str) -> Iterator[_Alike]:
    below = children_of(value) or []
    if type(value) in (list, tuple) and len(value) > 1:
        parts = [list(walk(one, path + name, DEFAULT)) for _, name, one in below]
        held = [[(p, x) for p, x, _ in part if isinstance(x, Tensor) and x.ndim] for part in parts]
        kinds = {
            (str(pytree.tree_structure(one)), *((x.dtype, x.ndim) for _, x in tensors))
            for one, tensors in zip(value, held, strict=True)
        }
        if held[0] and len(kinds) == 1:
            yield _Alike(path, len(value), {p: x for tensors in held for p, x in tensors})
    for _, name, child in below:
        yield from _alike(child, path + name)
