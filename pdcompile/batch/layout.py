"""BatchLayout: the dimension of each leaf that counts samples."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pdcompile.batch.call import (
    DEFAULT,
    Argument,
    CallSpec,
    FlatCall,
    is_dim,
    misfit,
    rebuild,
    walk,
)
from pdcompile.batch.lists import list_in_doubt
from pdcompile.batch.memory_order import memory_order
from pdcompile.errors import ConfigError, InputError, did_you_mean


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
        batch_dims: an int for all; None: nothing is split; a pytree prefix over (args, kwargs,
            target) of ints and Nones (None: replicated); or a dict from argument names (and
            ``target``) to such prefixes, others keep the default 0.  Negative counts from the
            last dimension.

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
        raise nothing_splits(microbatches)
    if microbatches > 1 and layout.doubt is not None:
        raise layout.doubt


def nothing_splits(microbatches: int) -> ConfigError:
    """The refusal of several microbatches where no input has a batch dimension."""
    return ConfigError(
        f"{microbatches} microbatches are asked for, and nothing in the minibatch has a dimension "
        "that counts samples",
        remedy="name one with batch_dims ({'x': 0} for an input x), or one microbatch",
    )


def check_batch_dims(batch_dims: Any) -> None:
    """Raises ConfigError for batch_dims that fit no call: other than dimensions in containers."""
    triple = isinstance(batch_dims, tuple | list) and len(batch_dims) == 3
    if not (triple or isinstance(batch_dims, Mapping) or is_dim(batch_dims)):
        raise _no_meaning(batch_dims)
    inside = [batch_dims]
    while inside:
        part = inside.pop()
        if isinstance(part, Mapping):
            inside.extend(part.values())
        elif isinstance(part, tuple | list):
            inside.extend(part)
        elif not is_dim(part):
            raise _no_meaning(batch_dims)


def _no_meaning(batch_dims: Any) -> ConfigError:
    return ConfigError(
        f"batch_dims={batch_dims!r} is not a valid value",
        remedy="an int, None, a tuple (args, kwargs, target) of ints, Nones and containers "
        "of them, or a dict from argument names to these",
    )


def _asked_dims(flat: FlatCall, batch_dims: Any) -> dict[str, Any]:
    """Dimension by path: an int, None, or DEFAULT where batch_dims does not say."""
    spec = flat.spec
    roots = [*spec.arguments, spec.target]
    if is_dim(batch_dims):
        return dict.fromkeys(flat.leaves, batch_dims if batch_dims != 0 else DEFAULT)
    if isinstance(batch_dims, Mapping):
        _refuse_unknown(batch_dims, spec)
        prefixes = [batch_dims.get(argument.root, DEFAULT) for argument in roots]
    elif isinstance(batch_dims, tuple | list) and len(batch_dims) == 3:
        args, kwargs, target = batch_dims
        for part in (args, kwargs):
            if not (is_dim(part) or isinstance(part, tuple | list | Mapping)):
                raise misfit("batch_dims", part)
        _refuse_unknown(kwargs, spec)
        _refuse_surplus(args, spec)
        prefixes = [_argument_prefix(one, spec, args, kwargs) for one in spec.arguments]
        prefixes.append(target)
    else:
        raise _no_meaning(batch_dims)
    asked = {}
    for argument, prefix in zip(roots, prefixes, strict=True):
        value = rebuild(argument, flat.leaves)
        for path, _, dim in walk(value, argument.root, prefix):
            asked[path] = dim
    return asked


def _argument_prefix(argument: Argument, spec: CallSpec, args: Any, kwargs: Any) -> Any:
    """The batch_dims of one argument, whether it was passed by position or by keyword."""
    name = argument.parameter if argument.key is None else argument.key
    if isinstance(kwargs, Mapping) and name in kwargs:
        return kwargs[name]
    positional = _positional(spec)
    if isinstance(args, tuple | list):
        if argument.key is None and name in positional and positional.index(name) < len(args):
            return args[positional.index(name)]
        if spec.signature.parameters[argument.parameter].kind is inspect.Parameter.VAR_POSITIONAL:
            rest = tuple(args[len(positional) :])
            return rest + (DEFAULT,) * (argument.tree.num_children - len(rest))
    chosen = kwargs if name in spec.by_keyword else args
    return chosen if is_dim(chosen) else DEFAULT


def _positional(spec: CallSpec) -> list[str]:
    return [
        parameter.name
        for parameter in spec.signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _refuse_unknown(prefixes: Any, spec: CallSpec) -> None:
    roots = [argument.root for argument in (*spec.arguments, spec.target)]
    known = dict.fromkeys((*roots, *spec.signature.parameters))
    names = prefixes if isinstance(prefixes, Mapping) else ()
    unknown = [str(name) for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"batch_dims names {', '.join(unknown)}, which this call does not have",
            remedy=f"known names: {', '.join(known)}",
        )


def _refuse_surplus(args: Any, spec: CallSpec) -> None:
    kinds = [parameter.kind for parameter in spec.signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or not isinstance(args, tuple | list):
        return
    if len(args) > len(_positional(spec)):
        raise ConfigError(
            f"batch_dims has {len(args)} entries for positional arguments, but forward takes "
            f"{len(_positional(spec))}",
            where=f"forward{spec.signature}",
            remedy="one entry an argument, or a dict of names",
        )


def _common_size(flat: FlatCall, sizes: dict[str, tuple[int, int]]) -> int:
    counts = Counter(size for _, size in sizes.values() if size != 1)
    if not counts:
        return 1
    size = counts.most_common(1)[0][0]  # the first one seen, among equally frequent sizes
    example = next(path for path, (_, one) in sizes.items() if one == size)
    for path, (dim, one) in sizes.items():
        if one not in (size, 1):
            raise InputError(
                f"dimension {dim} of {_shown(flat.leaves[path])} is neither the batch size "
                f"{size} (of {example}) nor 1",
                where=path,
                remedy=_remedy(flat, path),
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
