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
from pdcompile.passes.parts.signature import LETTERS, Form, Rule, Whole, letters_with, named

_UNKNOWN = "its dimensions are not known"
#: Arguments with which an op stays whole: position, name, and the default with which it need not.
_REFUSED: dict[str, tuple[tuple[int, str, Any], ...]] = {
    "embedding": (
        (3, "max_norm", None), (5, "scale_grad_by_freq", False), (6, "sparse", False),
    ),
    "crossentropy": ((2, "weight", None), (3, "size_average", None), (5, "reduce", None)),
    "groupedmm": ((3, "bias", None),),
}  # fmt: skip


def form_of(call: Call) -> Form:
    """The form of an op by its rule.

    Raises:
        Whole: it has none, or not with these arguments.
    """
    rule = RULES.get(call.name)
    if rule is None:
        raise Whole("no rule")
    if not call.operands:
        raise Whole("it makes a tensor of no other")
    for position, name, default in _REFUSED.get(call.name, ()):
        if call.argument(position, name, default) not in (default, None):
            raise Whole(f"it has {name}")
    try:
        return named(call, rule) if isinstance(rule, str) else rule(call)
    except (LookupError, TypeError, ValueError):
        raise Whole("its arguments are of a form without a rule") from None


def _elementwise(call: Call) -> Form:
    """Every operand broadcasts."""
    if not call.graph.values[call.op.name].is_tensor:
        raise Whole("it has several results")
    numbers = [*range(len(call.operands))]
    return Form(",".join("*" * len(numbers)) + "->*", numbers)


def _matmul(call: Call) -> Form:
    text = "input *xk, other|mat2 *ky -> *xy"
    for number, letter in enumerate("xy"):
        text = text.replace(letter, "") if call.rank(number) == 1 else text
    return named(call, text)


def _addmm(call: Call) -> Form:
    """The scaled product is summed with the rest on each part: what is summed is needed whole."""
    scaled = call.argument(3, "beta", 1) != 1 or call.argument(4, "alpha", 1) != 1
    k = "K" if scaled else "k"
    return named(call, f"+input mn, mat1 m{k}, mat2 {k}n -> mn")


def _attention(call: Call) -> Form:
    """Scaled dot-product attention: heads and batch free, queries too unless it is causal."""
    q = "Q" if call.argument(5, "is_causal", False) else "q"
    own, shared, sizes = "*", "*", {}
    if call.argument(7, "enable_gqa", False):
        own, shared, sizes = "b(hg)", "bh", {"h": call.extents(call.role(1, "key") or 0)[-3]}
    text = f"query {own}{q}D, key {shared}KD, value {shared}Ke, attn_mask? {own}{q}K -> {own}{q}e"
    return named(call, text, sizes=sizes)


def _multihead(call: Call) -> Form:
    """nn.MultiheadAttention: samples are free."""
    samples = "b{}" if call.argument(0, "batch_first", False) else "{}b"
    q, k = samples.format("Q"), samples.format("K")
    masks = "key_padding_mask? bK, attn_mask@5? QK"
    return named(call, f"query {q}E, key {k}F, value {k}G, {masks} -> {q}E,bQM")


def _grouped(call: Call) -> Form:
    """Rows sorted by expert, each by its expert's matrix: a sum over experts, of which each part
    has the rows of its own, and zeros."""
    return named(call, "mat_a Tk, mat_b ekn, =offs e -> Tn", vocabulary="e")


def _einsum(call: Call) -> Form:
    equation = call.argument(0, "equation")
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise Whole("its equation has no names for all dimensions")
    equation = equation.replace(" ", "")
    own = dict(zip(sorted({c for c in equation if c.isalpha()}), LETTERS, strict=False))
    terms = [i for i, operand in enumerate(call.operands) if operand.slot != 0]
    return Form("".join(own.get(c, c) for c in equation), terms)


def _normalised(call: Call) -> Form:
    """layer_norm and rms_norm: the last dimensions are needed whole."""
    last = letters_with(len(whole_numbers(call.argument(1, "normalized_shape")))).upper()
    return named(call, f"input *{last}, weight@2? {last}, bias@3? {last} -> *{last}")


def _grouped_norm(call: Call) -> Form:
    text = "input b(gC)&, weight@2? (gC), bias@3? (gC) -> b(gC)&"
    return named(call, text, sizes={"g": Extent(call.argument(1, "num_groups"))})


def _batch_norm(call: Call) -> Form:
    """Channels are free; samples and places where the statistics are not computed of them."""
    module = call.op.kind == "module"
    training = call.graph.training if module else call.argument(5, "training", False)
    training = training or call.role(1, "running_mean") is None
    b, places = ("B", "&") if training else ("b", "*")
    names = "running_mean? c, running_var? c, weight? c, bias? c"
    return named(call, f"input {b}c{places}, {names} -> {b}c{places}")


def _convolution(call: Call) -> Form:
    _refuse_without_samples(call)
    turned = "transpose" in call.name
    groups = call.argument(7 if turned else 6, "groups", 1)
    weight = "(gi)o" if turned else "(go)i"
    text = f"input b(gi)~, weight {weight}~, +bias (go) -> b(go)~"
    return named(call, text, sizes={"g": Extent(groups)})


def _pool(call: Call) -> Form:
    """Pools and resizing: samples and channels are free."""
    _refuse_without_samples(call)
    return Form("bc~->bc~")


def _refuse_without_samples(call: Call) -> None:
    """Refuse an op without samples: it looks along what would be channels."""
    places = call.rank(0) - 2
    asked = [int(letter) for letter in call.name if letter.isdecimal()] or [places]
    if len(call.out) != places + 2 or places not in (1, 2, 3) or asked != [places]:
        raise Whole("it has no samples and channels")


def _along(call: Call, dims: Sequence[int], made: str) -> Form:
    """An op that needs dimensions whole; each is `made` "kept", "new", "one" or "gone"."""
    if not dims or not call.operands or not call.rank(0):
        raise Whole(_UNKNOWN)
    rank = call.rank(0)
    read = letters_with(rank, dims)
    forms = {"kept": read, "new": LETTERS[-rank:][::-1].upper(), "one": "1" * rank}
    changed = forms.get(made, [""] * rank)
    result = [changed[i] if c.isupper() else c for i, c in enumerate(read)]
    return Form(f"{read}->{''.join(result)}")


def _whole_along(position: int, name: str, default: int | None, made: str) -> Rule:
    """Along the dimensions that an argument names, all of them are needed."""

    def rule(call: Call) -> Form:
        rest = call.op.args[position + 1 :] if name == "dims" else ()
        return _along(call, whole_numbers(call.argument(position, name, default), rest), made)

    return rule


def _reduced(call: Call) -> Form:
    """Reductions over given dimensions, or over all; sums may be of parts."""
    if call.name in ("max", "min") and call.role(1, "other") is not None:
        return _elementwise(call)
    gone = whole_numbers(call.argument(1, "dim|axis")) or tuple(range(call.rank(0)))
    made = call.graph.values[call.op.name]  # max and min of a dimension have places beside values
    kept = call.argument(2, "keepdim", False) if not made.is_tensor else (
        len(call.out) == call.rank(0))  # fmt: skip
    form = _along(call, gone, "one" if kept else "gone")
    return Form(form.signature.lower()) if call.name == "sum" else form


def _padded(call: Call) -> Form:
    given = call.argument(1, "pad|padding")
    if isinstance(given, int) and call.op.kind == "module":
        given = (given,) * 4
    if not isinstance(given, tuple):
        raise Whole(_UNKNOWN)
    pairs = range(len(given) // 2)
    dims = [-1 - i for i in pairs if given[2 * i : 2 * i + 2] != (0, 0)]
    return _along(call, dims, "new") if dims else Form("*->*")


def _unfolded(call: Call) -> Form:
    if call.op.kind != "method":
        raise Whole(_UNKNOWN)
    form = _along(call, whole_numbers(call.argument(1, "dimension")), "new")
    return Form(f"{form.signature}M")  # of no result with that many dimensions


def _permuted(call: Call) -> Form:
    dims = letters_with(call.rank(0))
    order = [*range(len(dims))]
    if call.name == "permute":
        order = [*whole_numbers(call.argument(1, "dims"), call.op.args[2:])]
    else:
        one = call.argument(1, "dim0|axis0", max(-2, -len(dims)))
        two = call.argument(2, "dim1|axis1", -1)
        order[one], order[two] = order[two], order[one]
    return Form(f"{dims}->{''.join(dims[i] for i in order)}")


def _embedding(call: Call) -> Form:
    """Rows of a table: each part has those of its own, and zeros for others'."""
    return named(call, "input *, weight vd -> *d", vocabulary="v")


def _cross_entropy(call: Call) -> Form:
    """Axes of cross entropy with class numbers: rows free or summed, classes reduced twice."""
    target = call.role(1, "target")
    if target is None or not call.about(target).dtype.startswith(("int", "uint")):
        raise Whole("its targets are no numbers of classes")
    rows = letters_with(call.rank(target))
    reduction = call.argument(6, "reduction", "mean")
    text = f"input {rows[:1]}v{rows[1:]}, target {rows} -> {rows if reduction == 'none' else ''}"
    return named(call, text, vocabulary="v", meets="v" + rows * (reduction == "mean"))


def _moved(call: Call) -> Form:
    to_dtype = any(isinstance(one, TorchLiteral) for one in call.op.args)
    if to_dtype or not (call.rank(0) or call.out):
        raise Whole(_UNKNOWN)
    return Form("")


def _expanded(call: Call) -> Form:
    """Dimensions of size one become loops that the operand does not have."""
    dims, rank = letters_with(len(call.out)), call.rank(0)
    return Form(f"{dims[len(dims) - rank :]}->{dims}")


def _repeated(call: Call) -> Form:
    times = whole_numbers(call.argument(1, "repeats"), call.op.args[2:])
    dims = letters_with(call.rank(0))
    if len(times) != len(call.out):
        raise Whole(_UNKNOWN)
    each = [*zip(times, dims.rjust(len(times), "1"), "RSTUVWXYZ", strict=False)]
    made = [own if count == 1 else f"({copy}{own.strip('1')})" for count, own, copy in each]
    sizes = {copy: extent(count) for count, _, copy in each}
    return Form(f"{dims}->{''.join(made)}", sizes=sizes)


def _letters(rank: int, dim: Any) -> tuple[str, str]:
    """Letters of dimensions, and that of the one which an argument says."""
    if not isinstance(dim, int) or not rank:
        raise Whole(_UNKNOWN)
    dims = letters_with(rank)
    return dims, dims[dim]


def _interleaved(call: Call) -> Form:
    """Every element several times in a row: heads that groups of queries share."""
    count = call.argument(1, "repeats")
    dims, own = _letters(call.rank(0), call.argument(2, "dim"))
    if not isinstance(count, int):
        raise Whole(_UNKNOWN)
    return Form(f"{dims}->{dims.replace(own, f'({own}R)')}", sizes={"R": Extent(count)})


def _sections(call: Call) -> Form:
    """split and chunk: equal sections are a factor, which is needed whole; others stay whole."""
    names = "split_size_or_sections|chunks|indices_or_sections|split_size|split_sizes"
    given, (dims, own) = call.argument(1, names), _letters(call.rank(0), call.argument(2, "dim", 0))
    size, whole = given, call.extents(0)[dims.index(own)]
    if isinstance(given, tuple) and len(set(given)) == 1:
        size = given[0]
    if isinstance(size, int | Affine) and (each := extent(size)).divides(whole):
        if size is given and call.name in ("chunk", "tensorsplit"):
            each = whole.over(each)
        return Form(f"{dims.replace(own, f'(S{own})')}->{dims}", sizes={own: each})
    count = len(given) if isinstance(given, tuple) else 0
    if not 0 < count <= 15:
        raise Whole("its sections are unequal")
    made = [dims.replace(own, letter) for letter in LETTERS[-count:].upper()]
    return Form(f"{dims.replace(own, own.upper())}->{','.join(made)}")


def _joined(call: Call) -> Form:
    """cat: the joined dimension is needed whole; what is empty there does not count."""
    given, dim = call.inside(0, "tensors"), call.argument(1, "dim|axis", 0)
    shapes = {i: call.about(i).shape for i in given if call.about(i).shape != (0,)}
    full = [i for i, shape in shapes.items() if shape[dim] != 0] or [*shapes][:1]
    dims, own = _letters(len(shapes[full[0]]) if full else 0, dim)
    if len(shapes) > 26 - len(dims):
        raise Whole("it joins too many tensors")
    letters = dict(zip(shapes, LETTERS[-len(shapes) :].upper(), strict=True))
    made = own.upper()
    if len(full) == 1:
        made = letters[full[0]] = own
    read = [dims.replace(own, letter) for letter in letters.values()]
    return Form(f"{','.join(read)}->{dims.replace(own, made)}", [*shapes])


def _stacked(call: Call) -> Form:
    given = call.inside(0, "tensors")
    dims, own = _letters(call.rank(given[0]) + 1, call.argument(1, "dim", 0))
    read = [dims.replace(own, "")] * len(given)
    return Form(f"{','.join(read)}->{dims.replace(own, own.upper())}", given)


def _gathered(call: Call) -> Form:
    """gather: along `dim` the operand is needed whole, the index is free."""
    index, (dims, own) = call.role(2, "index"), _letters(call.rank(0), call.argument(1, "dim"))
    if index is None or call.rank(0) != call.rank(index):
        raise Whole(_UNKNOWN)
    read, made = dims.replace(own, "Z"), dims
    for i, (whole, chosen) in enumerate(zip(call.extents(0), call.extents(index), strict=True)):
        if dims[i] != own and whole != chosen:
            read = read.replace(dims[i], LETTERS[-2 - i].upper())
            made = made.replace(dims[i], dims[i].upper())
    return Form(f"{read},{made}->{made}", [0, index])


def _selected(call: Call) -> Form:
    index, (dims, own) = call.role(2, "index"), _letters(call.rank(0), call.argument(1, "dim"))
    if index is None or call.rank(index) != 1:
        raise Whole(_UNKNOWN)
    return Form(f"{dims.replace(own, own.upper())},z->{dims.replace(own, 'z')}", [0, index])


def _indexed(call: Call) -> Form:
    """x[...]: numbers and slices need their dimension whole; tensors too, of what they index, and
    their own dimensions are free."""
    given = call.op.args[1]
    index = list(given if isinstance(given, tuple) else (given,))
    known = (int, Slice, Ref, Attr, type(None), type(...))
    if any(isinstance(part, bool) or not isinstance(part, known) for part in index):
        raise Whole("its index is no plain one")
    used = sum(part is not None and part is not ... for part in index)
    if ... not in index:
        index.append(...)
    at = index.index(...)
    index[at : at + 1] = [Slice()] * (call.rank(0) - used)
    tensors = [i for i, operand in enumerate(call.operands) if operand.slot == 1]
    places = [i for i, part in enumerate(index) if isinstance(part, Ref | Attr | int)]
    places = places if tensors else []
    masks = any(call.about(i).dtype in ("bool", "uint8") for i in tensors)
    if masks or places != [*range(min(places, default=0), max(places, default=-1) + 1)]:
        raise Whole("its index chooses by values")
    most = max(map(call.rank, tensors), default=0)
    chosen = LETTERS[len(LETTERS) - most :]
    read, made, letters = "", "", iter(LETTERS)
    for i, part in enumerate(index):
        if i in places[:1]:
            made += chosen
        if part is None:
            made += "1"
            continue
        own, kept = next(letters), _is_all(part, call.extents(0)[len(read)])
        read += own if kept else own.upper()
        if isinstance(part, Slice):  # of which something else is left
            made += own if kept else LETTERS[-1 - LETTERS.index(own)].upper()
    terms = [chosen[most - call.rank(i) :] for i in tensors]
    return Form(f"{','.join([read, *terms])}->{made}", [0, *tensors])


def _is_all(part: Any, size: Extent) -> bool:
    if not isinstance(part, Slice) or part.step not in (None, 1) or part.start not in (None, 0):
        return False
    stop = part.stop
    return stop is None or (isinstance(stop, int | Affine) and extent(stop) == size)


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
    **dict.fromkeys(words(_CASTS), "input * -> *"),
    "linear": "input *k, weight nk, +bias n -> *n",
    **dict.fromkeys(words("matmul mm mv bmm dot"), _matmul),
    "addmm": _addmm, "einsum": _einsum,
    "baddbmm": "input bmn, batch1 bmK, batch2 bKn -> bmn",  # input is part of every part's product
    "groupedmm": _grouped,
    "outer": "input m, vec2 n -> mn",
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
    "onehot": "input|tensor * -> *Z",
}  # fmt: skip
