"""Lists that may have one element for each sample, where splitting takes rows of every element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from pdcompile.batch.call import DEFAULT, FlatCall, children_of, rebuild, walk
from pdcompile.errors import InputError
from pdcompile.releases.torch_internals import pytree


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
            return _error(flat, one)
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


def _error(flat: FlatCall, one: _Alike) -> InputError:
    path, tensor = next(iter(one.tensors.items()))
    return InputError(
        f"a list of {one.length} may have one element for each sample, and microbatches would be "
        f"cut along dimension 0 of the elements ({path} has shape {tuple(tensor.shape)})",
        where=one.path,
        remedy="samples: stack them to one tensor with a row for each, padded where they differ "
        "(unbind() takes it apart in forward), or microbatches=1 with batch_dims=None; rows of "
        f"every element: batch_dims={{{flat.root(path)!r}: 0}}",
    )
