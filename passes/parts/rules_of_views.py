"""Rules of ops that only move data: views, permutations, slices, splits, joins, indices."""

from __future__ import annotations

from typing import Any

from pdcompile.ir.graph import Affine, Attr, Ref, Slice
from pdcompile.passes.costs.costed_op import words
from pdcompile.passes.parts.atoms import Extent, extent
from pdcompile.passes.parts.calls import Call, whole_numbers
from pdcompile.passes.parts.signature import LETTERS, Form, Rule, letters_with

_UNKNOWN = "its dimensions are not known"


def _moved(call: Call) -> Form | str:
    return Form("") if call.rank(0) or call.out else _UNKNOWN


def _permuted(call: Call) -> Form | str:
    rank = call.rank(0)
    dims = letters_with(rank)
    if call.name in ("t", "mt", "h", "mh"):
        if rank > 2 and call.name in ("t", "h"):
            return Form(f"{dims}->{dims[::-1]}")
        return Form(f"{dims}->{dims[:-2]}{dims[-2:][::-1]}")
    if call.name == "permute":
        order = whole_numbers(call.argument(1, "dims"), call.op.args[2:])
    else:
        first, second = (
            call.argument(i, name, call.argument(i, other))
            for i, name, other in ((1, "dim0", "axis0"), (2, "dim1", "axis1"))
        )
        if not isinstance(first, int) or not isinstance(second, int):
            return _UNKNOWN
        swapped = {first % rank: second % rank, second % rank: first % rank}
        order = tuple(swapped.get(i, i) for i in range(rank))
    if len(order) != rank:
        return _UNKNOWN
    return Form(f"{dims}->{''.join(dims[i] for i in order)}")


def _expanded(call: Call) -> Form:
    """Dimensions of size one become loops that the operand does not have."""
    dims, rank = letters_with(len(call.out)), call.rank(0)
    return Form(f"{dims[len(dims) - rank :]}->{dims}")


def _repeated(call: Call) -> Form | str:
    times = whole_numbers(call.argument(1, "repeats"), call.op.args[2:])
    rank, dims = call.rank(0), letters_with(call.rank(0))
    if len(times) != len(call.out) or len(times) > 9:
        return _UNKNOWN
    copies, made = "RSTUVWXYZ", ""
    for i, count in enumerate(times):
        own = dims[i - len(times) + rank] if i >= len(times) - rank else ""
        made += own if count == 1 and own else f"({copies[i]}{own})"
    sizes = {copies[i]: extent(count) for i, count in enumerate(times)}
    return Form(f"{dims}->{made}", sizes=sizes)


def _interleaved(call: Call) -> Form | str:
    """Every element several times in a row: heads that groups of queries share."""
    count, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if not isinstance(count, int) or not isinstance(dim, int):
        return _UNKNOWN
    dims = letters_with(call.rank(0))
    at = dim % len(dims)
    made = f"{dims[:at]}({dims[at]}R){dims[at + 1 :]}"
    return Form(f"{dims}->{made}", sizes={"R": Extent(count)})


def _whole_along(changed: str) -> Rule:
    """Along one dimension something else comes of it: `changed` in its place, "" for nothing."""

    def rule(call: Call) -> Form | str:
        dim = call.argument(1, "dim", call.argument(1, "dimension", 0 if not changed else -1))
        if not isinstance(dim, int):
            return _UNKNOWN
        dims = letters_with(call.rank(0), capital=(dim,))
        own = dims[dim]
        return Form(f"{dims}->{dims.replace(own, changed)}")

    return rule


def _unfolded(call: Call) -> Form | str:
    dim = call.argument(1, "dimension")
    if call.op.kind != "method" or not isinstance(dim, int):
        return _UNKNOWN
    dims = letters_with(call.rank(0), capital=(dim,))
    return Form(f"{dims}->{dims.replace(dims[dim], 'Y')}Z")


def _sections(call: Call) -> Form | str:
    """split and chunk: equal sections are a factor, which is needed whole; others stay whole."""
    given, dim = call.argument(1, "split_size_or_sections"), call.argument(2, "dim", 0)
    if call.name in ("chunk", "tensorsplit"):
        given = call.argument(1, "chunks", call.argument(1, "indices_or_sections"))
    elif given is None:
        given = call.argument(1, "split_size", call.argument(1, "split_sizes"))
    if not isinstance(dim, int):
        return _UNKNOWN
    dims = letters_with(call.rank(0))
    at = dim % len(dims)
    before, own, after = dims[:at], dims[at], dims[at + 1 :]
    each = _equal_section(call, given, call.extents(0)[at])
    if each is not None:
        return Form(f"{before}(S{own}){after}->{before}{own}{after}", sizes={own: each})
    count = len(given) if isinstance(given, tuple) else 0
    if not 0 < count <= 15:
        return "its sections are unequal"
    made = [f"{before}{letter}{after}" for letter in LETTERS[-count:].upper()]
    return Form(f"{before}{own.upper()}{after}->{','.join(made)}")


def _equal_section(call: Call, given: Any, whole: Extent) -> Extent | None:
    if isinstance(given, tuple):
        return extent(given[0]) if len(set(given)) == 1 and given else None
    if not isinstance(given, int | Affine):
        return None
    size = extent(given)
    if not size.divides(whole):
        return None
    return whole.over(size) if call.name in ("chunk", "tensorsplit") else size


def _unbound(call: Call) -> Form | str:
    dim = call.argument(1, "dim", 0)
    dims = letters_with(call.rank(0), capital=(dim,))
    return Form(f"{dims}->{dims.replace(dims[dim], '')}")


def _joined(call: Call) -> Form | str:
    """cat: the joined dimension is needed whole; what is empty does not count."""
    given = call.inside(0, "tensors")
    dim = call.argument(1, "dim", call.argument(1, "axis", 0))
    if not given or not isinstance(dim, int):
        return _UNKNOWN
    full = [i for i in given if call.shape(i) != (0,)]
    full = [i for i in full if call.shape(i)[dim] != 0] or full[:1]
    dims = letters_with(call.rank(full[0])) if full else ""
    if not dims or len(full) > 26 - len(dims):
        return "it joins too many tensors"
    if len(full) == 1:
        return Form(f"{dims}->{dims}", full)
    at = dim % len(dims)
    own = [dims[:at] + letter + dims[at + 1 :] for letter in LETTERS[-len(full) :].upper()]
    return Form(f"{','.join(own)}->{dims[:at]}{dims[at].upper()}{dims[at + 1 :]}", full)


def _stacked(call: Call) -> Form | str:
    given, dim = call.inside(0, "tensors"), call.argument(1, "dim", 0)
    if not given or not isinstance(dim, int):
        return _UNKNOWN
    dims = letters_with(call.rank(given[0]))
    at = dim % (len(dims) + 1)
    return Form(f"{','.join([dims] * len(given))}->{dims[:at]}Z{dims[at:]}", given)


def _padded(call: Call) -> Form | str:
    given = call.argument(1, "pad", call.argument(1, "padding"))
    if isinstance(given, int) and call.op.kind == "module":
        given = (given,) * 4
    if not isinstance(given, tuple):
        return _UNKNOWN
    dims = list(letters_with(call.rank(0)))
    made = [*dims]
    for i in range(len(given) // 2):
        if given[2 * i : 2 * i + 2] != (0, 0):
            dims[-1 - i], made[-1 - i] = dims[-1 - i].upper(), LETTERS[-1 - i].upper()
    return Form(f"{''.join(dims)}->{''.join(made)}")


def _turned(call: Call) -> Form | str:
    """roll and flip: the dimensions that they turn are needed whole."""
    given = call.argument(*((2, "dims") if call.name == "roll" else (1, "dims")))
    turned = whole_numbers(given, call.op.args[2:] if call.name == "flip" else ())
    if not turned:
        return _UNKNOWN
    dims = letters_with(call.rank(0), capital=turned)
    return Form(f"{dims}->{dims}")


def _triangle(call: Call) -> Form:
    return Form("*MN->*MN")


def _gathered(call: Call) -> Form | str:
    """gather: along `dim` the operand is needed whole, the index is free."""
    index, dim = call.role(2, "index"), call.argument(1, "dim")
    if index is None or not isinstance(dim, int) or call.rank(0) != call.rank(index):
        return _UNKNOWN
    dims = letters_with(call.rank(0))
    read, places = [*dims], [*dims]
    for i, (own, chosen) in enumerate(zip(call.extents(0), call.extents(index), strict=True)):
        if i == dim % len(dims):
            read[i] = "Z"
        elif own != chosen:
            read[i], places[i] = LETTERS[-2 - i].upper(), places[i].upper()
    made = "".join(places)
    return Form(f"{''.join(read)},{made}->{made}", [0, index])


def _selected(call: Call) -> Form | str:
    dim, index = call.argument(1, "dim"), call.role(2, "index")
    if index is None or not isinstance(dim, int) or call.rank(index) != 1:
        return _UNKNOWN
    dims = letters_with(call.rank(0), capital=(dim,))
    return Form(f"{dims},z->{dims.replace(dims[dim], 'z')}", [0, index])


def _indexed(call: Call) -> Form | str:
    """x[...]: numbers and slices need their dimension whole, tensors of indices are free."""
    given = call.op.args[1]
    index = list(given if isinstance(given, tuple) else (given,))
    tensors = [part for part in index if isinstance(part, Ref | Attr)]
    known = (int, Slice, Ref, Attr, type(None), type(...))
    if any(isinstance(part, bool) or not isinstance(part, known) for part in index):
        return "its index is no plain one"
    used = sum(part is not None and part is not ... for part in index)
    rank = call.rank(0)
    if ... not in index:
        index.append(...)
    at = index.index(...)
    index[at : at + 1] = [Slice()] * (rank - used)
    if tensors:
        return _looked_up(call, index)
    read, made, letters = "", "", iter(LETTERS)
    for part in index:
        if part is None:
            made += "1"
            continue
        own, size = next(letters), call.extents(0)[len(read)]
        whole = isinstance(part, int) or not _is_all(part, size)
        read += own.upper() if whole else own
        made += "" if isinstance(part, int) else own
    changed = "".join(_other(c) if c.upper() in read and c != "1" else c for c in made)
    return Form(f"{read}->{changed}")


def _other(letter: str) -> str:
    """The capital for what a slice leaves of a dimension."""
    return LETTERS[-1 - LETTERS.index(letter)].upper()


def _is_all(part: Slice, size: Extent) -> bool:
    if part.step not in (None, 1) or part.start not in (None, 0):
        return False
    if part.stop is None:
        return True
    return isinstance(part.stop, int | Affine) and extent(part.stop) == size


def _looked_up(call: Call, index: list[Any]) -> Form | str:
    """Tensors among the indices: what they index is needed whole, their own dimensions are free."""
    numbers = [i for i, operand in enumerate(call.operands) if operand.slot == 1]
    places = [i for i, part in enumerate(index) if isinstance(part, Ref | Attr | int)]
    masks = any(call.dtype(i) in ("bool", "uint8") for i in numbers)
    if masks or places != [*range(places[0], places[-1] + 1)]:
        return "its index chooses by values"
    chosen = LETTERS[-max(map(call.rank, numbers)) :] if any(map(call.rank, numbers)) else ""
    read, made, letters = "", "", iter(LETTERS)
    for i, part in enumerate(index):
        if i == places[0]:
            made += chosen
        if part is None:
            made += "1"
            continue
        own, size = next(letters), call.extents(0)[len(read)]
        if i in places:
            read += own.upper()
        elif _is_all(part, size):
            read, made = read + own, made + own
        else:
            read, made = read + own.upper(), made + _other(own)
    terms = [chosen[len(chosen) - call.rank(i) :] for i in numbers]
    return Form(f"{','.join([read, *terms])}->{made}", [0, *numbers])


VIEWS: dict[str, Rule] = {
    **dict.fromkeys(
        words("view viewas reshape reshapeas flatten unflatten squeeze unsqueeze ravel"), _moved
    ),
    **dict.fromkeys(words("transpose swapaxes swapdims permute t mt"), _permuted),
    **dict.fromkeys(words("expand expandas broadcastto"), _expanded),
    "repeat": _repeated,
    "repeatinterleave": _interleaved,
    **dict.fromkeys(words("narrow glu"), _whole_along("Z")),
    "select": _whole_along(""),
    "unfold": _unfolded,
    **dict.fromkeys(words("split chunk tensorsplit splitwithsizes"), _sections),
    "unbind": _unbound,
    **dict.fromkeys(words("cat concat"), _joined),
    "stack": _stacked,
    "pad": _padded,
    **dict.fromkeys(words("roll flip"), _turned),
    **dict.fromkeys(words("tril triu"), _triangle),
    "gather": _gathered,
    "indexselect": _selected,
    "onehot": lambda call: Form("*->*Z"),
    "getitem": _indexed,
}
