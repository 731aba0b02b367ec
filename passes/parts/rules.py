"""The rules: which loops each kind of op has, as signatures (see `signature`).

One table from the plain names of ops to rules.  A rule is a signature, or what makes one of an
op's arguments.  An op without a rule is computed whole on every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdcompile.ir.graph import Affine, Attr, Ref, Slice, TorchLiteral
from pdcompile.passes.costs.costed_op import words
from pdcompile.passes.parts.atoms import Extent, extent
from pdcompile.passes.parts.calls import Call, whole_numbers
from pdcompile.passes.parts.signature import LETTERS, Form, Rule, letters_with

_UNKNOWN = "its dimensions are not known"


def _plain(signature: str, *names: str) -> Rule:
    """A signature whose terms are the arguments of these names, in order."""

    def rule(call: Call) -> Form:
        return Form(signature, [call.role(i, name) for i, name in enumerate(names)])

    return rule


def _elementwise(call: Call) -> Form | str:
    """Every operand broadcasts."""
    if not call.graph.values[call.op.name].is_tensor:
        return "it has several results"
    numbers = [*range(len(call.operands))]
    return Form(",".join("*" * len(numbers)) + "->*", numbers)


def _matmul(call: Call) -> Form | str:
    left, right = call.role(0, "input"), call.role(1, "other")
    if right is None:
        right = call.role(1, "mat2")
    if left is None or right is None:
        return "its operands are not known"
    ranks = min(call.rank(left), 2), min(call.rank(right), 2)
    signature = {
        (2, 2): "*mk,*kn->*mn", (2, 1): "*mk,k->*m", (1, 2): "k,*kn->*n", (1, 1): "k,k->",
    }.get(ranks)  # fmt: skip
    return Form(signature, [left, right]) if signature else "its operands have no dimensions"


def _addmm(call: Call) -> Form:
    bias, left = call.role(0, "input"), call.role(1, "mat1")
    dims = "" if bias is None else "mn"[-call.rank(bias) :] if call.rank(bias) else ""
    k = "k" if call.argument(3, "beta", 1) == 1 and call.argument(4, "alpha", 1) == 1 else "K"
    return Form(f"+{dims},m{k},{k}n->mn", [bias, left, call.role(2, "mat2")])


def _baddbmm(call: Call) -> Form | str:
    """The added tensor is part of every part's product: what is summed is needed whole."""
    added, left, right = (call.role(i, n) for i, n in enumerate(("input", "batch1", "batch2")))
    if added is None or not call.rank(added):
        return "its operands are not known"
    return Form(f"{'bmn'[-call.rank(added) :]},bmK,bKn->bmn", [added, left, right])


def _attention(call: Call) -> Form | str:
    """Scaled dot-product attention: heads and batch free, queries too unless it is causal."""
    names = ("query", "key", "value", "attn_mask")
    numbers = [call.role(i, name) for i, name in enumerate(names)]
    query, key, _, mask = numbers
    if query is None or key is None:
        return "its operands are not known"
    q = "Q" if call.argument(5, "is_causal", False) else "q"
    if not call.argument(7, "enable_gqa", False):
        return Form(f"*{q}D,*KD,*Ke,*{q}K->*{q}e", numbers)
    if call.rank(query) != 4:
        return "groups of heads need four dimensions"
    heads = ("", "", "", "(hg)", "b(hg)")[call.rank(mask) if mask is not None else 0]
    signature = f"b(hg){q}D,bhKD,bhKe,{heads}{q}K->b(hg){q}e"
    return Form(signature, numbers, {"h": call.extents(key)[1]})


def _multihead(call: Call) -> Form | str:
    """nn.MultiheadAttention: samples are free."""
    names = {0: "query", 1: "key", 2: "value", 3: "key_padding_mask", 5: "attn_mask"}
    numbers = [next(iter(call.inside(i, name)), None) for i, name in names.items()]
    query, *_, mask = numbers
    if query is None or call.rank(query) != 3 or (mask is not None and call.rank(mask) != 2):
        return "its samples are no dimension of their own"
    signature = "bQE,bKF,bKG,bK,QK->bQE,bQM"
    if not call.argument(0, "batch_first", False):
        signature = "QbE,KbF,KbG,bK,QK->QbE,bQM"
    return Form(signature, numbers)


def _einsum(call: Call) -> Form | str:
    equation = call.argument(0, "equation")
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return "its equation has no names for all dimensions"
    equation = equation.replace(" ", "")
    own = dict(zip(sorted({c for c in equation if c.isalpha()}), LETTERS, strict=False))
    terms = [i for i, operand in enumerate(call.operands) if operand.slot != 0]
    return Form("".join(own.get(c, c) for c in equation), terms)


def _normalised(call: Call) -> Form:
    """layer_norm and rms_norm: the last dimensions are needed whole."""
    last = letters_with(len(whole_numbers(call.argument(1, "normalized_shape"))), capital="all")
    numbers = [call.role(0, "input"), call.role(2, "weight"), call.role(3, "bias")]
    return Form(f"*{last},{last},{last}->*{last}", numbers)


def _grouped_norm(call: Call) -> Form | str:
    groups = call.argument(1, "num_groups")
    if not isinstance(groups, int):
        return "its number of groups is not known"
    rest = letters_with(call.rank(0) - 2, capital="all")
    numbers = [0, call.role(2, "weight"), call.role(3, "bias")]
    return Form(f"b(gC){rest},(gC),(gC)->b(gC){rest}", numbers, {"g": Extent(groups)})


def _batch_norm(call: Call) -> Form:
    """Channels are free; samples and places where the statistics are not computed of them."""
    module = call.op.kind == "module"
    training = call.graph.training if module else call.argument(5, "training", False)
    training = training or call.role(1, "running_mean") is None
    rest = letters_with(call.rank(0) - 2, capital="all" if training else "", skip="bc")
    b = "B" if training else "b"
    names = ("running_mean", "running_var", "weight", "bias")
    numbers = [call.role(i, name) for i, name in enumerate(names, 1)]
    return Form(f"{b}c{rest},c,c,c,c->{b}c{rest}", [0, *numbers])


def _convolution(call: Call) -> Form | str:
    weight = call.role(1, "weight")
    if weight is None or call.rank(0) != call.rank(weight):
        return "its weight is not known"
    places = call.rank(0) - 2
    seen, kernel, made = "UVW"[:places], "XYZ"[:places], "RST"[:places]
    turned = "transpose" in call.name
    groups = call.argument(7 if turned else 6, "groups", 1)
    if not isinstance(groups, int):
        return "its number of groups is not known"
    shape = f"(gi)o{kernel}" if turned else f"(go)i{kernel}"
    signature = f"b(gi){seen},{shape},+(go)->b(go){made}"
    return Form(signature, [0, weight, call.role(2, "bias")], {"g": Extent(groups)})


def _pool(call: Call) -> Form | str:
    """Pools and resizing: samples and channels are free; without samples a pool looks along what
    would be channels."""
    places = call.rank(0) - 2
    named = [int(letter) for letter in call.name if letter.isdecimal()] or [places]
    if len(call.out) != places + 2 or places not in (1, 2, 3) or named != [places]:
        return "it has no samples and channels"
    return Form(f"bc{'UVW'[:places]}->bc{'RST'[:places]}", [0])


def _along(call: Call, dims: Sequence[int], made: str) -> Form | str:
    """An op that needs dimensions whole; each is `made` "kept", "new", "one" or "gone"."""
    if not dims or not call.operands or not call.rank(0):
        return _UNKNOWN
    rank = call.rank(0)
    read = letters_with(rank, capital=dims)
    forms = {"kept": read, "new": LETTERS[-rank:][::-1].upper(), "one": "1" * rank}
    changed = forms.get(made, [""] * rank)
    result = [changed[i] if c.isupper() else c for i, c in enumerate(read)]
    return Form(f"{read}->{''.join(result)}")


def _whole_along(position: int, name: str, default: int | None, made: str) -> Rule:
    """Along the dimensions that an argument names, all of them are needed."""

    def rule(call: Call) -> Form | str:
        rest = call.op.args[position + 1 :] if name == "dims" else ()
        return _along(call, whole_numbers(call.argument(position, name, default), rest), made)

    return rule


def _reduced(call: Call) -> Form | str:
    """Reductions over given dimensions, or over all; sums may be of parts."""
    if not call.operands or not call.graph.values[call.op.name].is_tensor:
        return "it has several results"
    if call.name in ("max", "min") and call.role(1, "other") is not None:
        return _elementwise(call)
    rank, given = call.rank(0), call.argument(1, "dim", call.argument(1, "axis"))
    gone = whole_numbers(given) or tuple(range(rank))
    form = _along(call, gone, "one" if len(call.out) == rank else "gone")
    if call.name == "sum" and isinstance(form, Form):
        return Form(form.signature.lower())
    return form


def _padded(call: Call) -> Form | str:
    given = call.argument(1, "pad", call.argument(1, "padding"))
    if isinstance(given, int) and call.op.kind == "module":
        given = (given,) * 4
    if not isinstance(given, tuple):
        return _UNKNOWN
    pairs = range(len(given) // 2)
    dims = [-1 - i for i in pairs if given[2 * i : 2 * i + 2] != (0, 0)]
    return _along(call, dims, "new") if dims else Form("*->*")


def _unfolded(call: Call) -> Form | str:
    form = _along(call, whole_numbers(call.argument(1, "dimension")), "new")
    if call.op.kind != "method" or isinstance(form, str):
        return _UNKNOWN
    return Form(f"{form.signature}M")  # of no result with that many dimensions


def _permuted(call: Call) -> Form | str:
    rank = call.rank(0)
    order = [*range(rank)]
    if call.name == "permute":
        order = [*whole_numbers(call.argument(1, "dims"), call.op.args[2:])]
    else:
        named = ((1, "dim0", "axis0"), (2, "dim1", "axis1"))
        one, two = (call.argument(i, name, call.argument(i, other)) for i, name, other in named)
        if call.name in ("t", "mt"):
            one, two = -2 if rank > 1 else -1, -1
        order[one], order[two] = order[two], order[one]
    dims = letters_with(rank)
    return Form(f"{dims}->{''.join(dims[i] for i in order)}")


def _embedding(call: Call) -> Form | str:
    """Rows of a table: each part has those of its own, and zeros for others'."""
    for position, name in ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse")):
        if call.argument(position, name):
            return f"it has {name}"
    return Form("*,vd->*d", [call.role(0, "input"), call.role(1, "weight")], vocabulary="v")


def _cross_entropy(call: Call) -> Form | str:
    """Axes of cross entropy with class numbers: rows free or summed, classes reduced twice."""
    logits, target = call.role(0, "input"), call.role(1, "target")
    if logits is None or target is None:
        return "its operands are not known"
    if call.role(2, "weight") is not None:
        return "its classes have weights"
    if call.argument(3, "size_average") is not None or call.argument(5, "reduce") is not None:
        return "its reduction is not known"
    if not call.dtype(target).startswith(("int", "uint")):
        return "its targets are no numbers of classes"
    rows = letters_with(call.rank(target), skip="v")
    reduction = call.argument(6, "reduction", "mean")
    signature = f"{rows[:1]}v{rows[1:]},{rows}->{rows if reduction == 'none' else ''}"
    return Form(signature, [logits, target], {}, "v", f"v{rows if reduction == 'mean' else ''}")


def _grouped_products(call: Call) -> Form | str:
    """Rows sorted by expert, each times its expert's matrix; rows and experts are needed whole."""
    left, right = call.role(0, "mat_a"), call.role(1, "mat_b")
    if left is None or right is None or (call.rank(left), call.rank(right)) != (2, 3):
        return "it is not of rows and a stack of matrices"
    if call.argument(3, "bias") is not None:
        return "it has a bias"
    return Form("Tk,Ekn->Tn", [left, right])


def _moved(call: Call) -> Form | str:
    to_dtype = any(isinstance(one, TorchLiteral) for one in call.op.args)
    return Form("") if (call.rank(0) or call.out) and not to_dtype else _UNKNOWN


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


def _joined(call: Call) -> Form | str:
    """cat: the joined dimension is needed whole; what is empty there does not count."""
    given = call.inside(0, "tensors")
    dim = call.argument(1, "dim", call.argument(1, "axis", 0))
    if not given or not isinstance(dim, int):
        return _UNKNOWN
    shaped = [i for i in given if call.shape(i) != (0,)]
    full = [i for i in shaped if call.shape(i)[dim] != 0] or shaped[:1]
    dims = letters_with(call.rank(full[0])) if full else ""
    if not dims or len(shaped) > 26 - len(dims):
        return "it joins too many tensors"
    at, letters = dim % len(dims), dict(zip(shaped, LETTERS[-len(shaped) :].upper(), strict=True))
    made = dims[at].upper()
    if len(full) == 1:
        made = letters[full[0]] = dims[at]
    own = [dims[:at] + letter + dims[at + 1 :] for letter in letters.values()]
    return Form(f"{','.join(own)}->{dims[:at]}{made}{dims[at + 1 :]}", shaped)


def _stacked(call: Call) -> Form | str:
    given, dim = call.inside(0, "tensors"), call.argument(1, "dim", 0)
    if not given or not isinstance(dim, int):
        return _UNKNOWN
    dims = letters_with(call.rank(given[0]))
    at = dim % (len(dims) + 1)
    return Form(f"{','.join([dims] * len(given))}->{dims[:at]}Z{dims[at:]}", given)


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
    stop, begins = part.stop, part.step in (None, 1) and part.start in (None, 0)
    return begins and (stop is None or (isinstance(stop, int | Affine) and extent(stop) == size))


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


ELEMENTWISE = words(
    "add sub mul div pow neg abs exp log log1p expm1 sqrt rsqrt sin cos tanh sigmoid relu relu6 "
    "gelu silu mish elu selu celu leakyrelu hardswish hardsigmoid hardtanh softplus softsign "
    "logsigmoid erf sign ceil floor round square reciprocal clamp clampmin clampmax maximum "
    "minimum where maskedfill eq ne lt le gt ge and or xor logicalnot logicaland logicalor "
    "bitwisenot isnan isinf isfinite nantonum floordivide floordiv mod remainder fmod lerp "
    "addcmul addcdiv identity contiguous clone detach atan2 rsub sinc logit threshold "
    "tanhshrink hardshrink softshrink"
)
_CASTS = (
    "to float half double bfloat16 int long bool type typeas zeroslike oneslike emptylike fulllike "
    "dropout"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(words(_CASTS), lambda call: Form("*->*")),  # others tell dtypes alone
    "linear": _plain("*k,nk,+n->*n", "input", "weight", "bias"),
    **dict.fromkeys(words("matmul mm mv bmm dot"), _matmul),
    "addmm": _addmm, "baddbmm": _baddbmm, "einsum": _einsum, "groupedmm": _grouped_products,
    "outer": _plain("m,n->mn", "input", "vec2"),
    "scaleddotproductattention": _attention, "multiheadattention": _multihead,
    "embedding": _embedding, "crossentropy": _cross_entropy,
    **dict.fromkeys(words("layernorm rmsnorm"), _normalised),
    "groupnorm": _grouped_norm,
    **dict.fromkeys(words("batchnorm batchnorm1d batchnorm2d batchnorm3d"), _batch_norm),
    **{f"conv{kind}{n}d": _convolution for kind in ("", "transpose") for n in (1, 2, 3)},
    **{f"{kind}pool{n}d": _pool for kind in words("max avg lp adaptiveavg adaptivemax")
       for n in (1, 2, 3)},
    **dict.fromkeys(words("interpolate upsample"), _pool),
    **dict.fromkeys(words("softmax logsoftmax cumsum cumprod logcumsumexp"),
                    _whole_along(1, "dim", None, "kept")),
    "sort": _whole_along(1, "dim", -1, "kept"),
    "topk": _whole_along(2, "dim", -1, "new"),
    "roll": _whole_along(2, "dims", None, "kept"),
    "flip": _whole_along(1, "dims", None, "kept"),
    **dict.fromkeys(words("tril triu"), lambda call: _along(call, (-2, -1), "kept")),
    **dict.fromkeys(words("narrow glu"), _whole_along(1, "dim", -1, "new")),
    "select": _whole_along(1, "dim", None, "gone"),
    "unbind": _whole_along(1, "dim", 0, "gone"),
    "unfold": _unfolded, "pad": _padded,
    **dict.fromkeys(words("sum mean amax amin max min var std prod any all logsumexp argmax "
                          "argmin"), _reduced),
    **dict.fromkeys(words("view viewas reshape reshapeas flatten unflatten squeeze unsqueeze "
                          "ravel"), _moved),
    **dict.fromkeys(words("transpose swapaxes swapdims permute t mt"), _permuted),
    **dict.fromkeys(words("expand expandas broadcastto"), _expanded),
    "repeat": _repeated, "repeatinterleave": _interleaved,
    **dict.fromkeys(words("split chunk tensorsplit splitwithsizes"), _sections),
    **dict.fromkeys(words("cat concat"), _joined),
    "stack": _stacked, "gather": _gathered, "indexselect": _selected, "getitem": _indexed,
    "onehot": lambda call: Form("*->*Z"),
}  # fmt: skip
