"""The rules: which loops each kind of op has, as signatures (see `signature`).

One table from the plain names of ops to rules.  A rule is a signature, or what makes one of an
op's arguments.  An op without a rule is computed whole on every part.
"""

from __future__ import annotations

from pdcompile.passes.costs.costed_op import words
from pdcompile.passes.parts.atoms import Extent
from pdcompile.passes.parts.calls import Call, whole_numbers
from pdcompile.passes.parts.rules_of_views import VIEWS
from pdcompile.passes.parts.signature import LETTERS, Form, Rule, letters_with


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


def _like_first(call: Call) -> Form | str:
    """The first operand's dimensions; another one is asked for its dtype or device alone."""
    return Form("*->*", [0])


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
    weight = call.role(2, "weight")
    return Form(
        f"b(gC){rest},(gC),(gC)->b(gC){rest}",
        [0, weight, call.role(3, "bias")],
        {"g": Extent(groups)},
    )


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
    """Pools and resizing: samples and channels are free."""
    places = call.rank(0) - 2
    if len(call.out) != places + 2 or places not in (1, 2, 3):
        return "it has no samples and channels"
    return Form(f"bc{'UVW'[:places]}->bc{'RST'[:places]}", [0])


def _over_one(call: Call) -> Form | str:
    """softmax, cumsum and the like: one dimension is needed whole."""
    dim = call.argument(1, "dim")
    if not isinstance(dim, int) or not call.operands:
        return "its dimension is not known"
    dims = letters_with(call.rank(0), capital=(dim,))
    return Form(f"{dims}->{dims}", [0])


def _with_indices(call: Call) -> Form | str:
    """sort and topk: values and their places, along one dimension."""
    second = call.name == "topk"
    dim = call.argument(2 if second else 1, "dim", -1)
    if not isinstance(dim, int) or not call.operands:
        return "its dimension is not known"
    dims = letters_with(call.rank(0), capital=(dim,))
    made = dims.replace(dims[dim], "Z") if second else dims
    return Form(f"{dims}->{made},{made}", [0])


def _reduced(summed: bool) -> Rule:
    """Reductions over given dimensions, or over all."""

    def rule(call: Call) -> Form | str:
        if not call.operands or not call.graph.values[call.op.name].is_tensor:
            return "it has several results"
        if call.name in ("max", "min") and call.role(1, "other") is not None:
            return _elementwise(call)
        rank = call.rank(0)
        given = call.argument(1, "dim", call.argument(1, "axis"))
        gone = (
            {d % rank for d in whole_numbers(given)} if given not in (None, ()) else {*range(rank)}
        )
        dims = letters_with(rank, capital=() if summed else tuple(gone))
        kept = len(call.out) == rank
        left = [("1" if kept else "") if i in gone else dims[i] for i in range(rank)]
        return Form(f"{dims}->{''.join(left)}", [0])

    return rule


def _embedding(call: Call) -> Form | str:
    """Rows of a table: the table's rows are needed whole, its width is free."""
    for position, name in ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse")):
        if call.argument(position, name):
            return f"it has {name}"
    return Form("*,Vd->*d", [call.role(0, "input"), call.role(1, "weight")])


def _grouped_products(call: Call) -> Form | str:
    """Rows sorted by expert, each times its expert's matrix; rows and experts are needed whole."""
    left, right = call.role(0, "mat_a"), call.role(1, "mat_b")
    if left is None or right is None or (call.rank(left), call.rank(right)) != (2, 3):
        return "it is not of rows and a stack of matrices"
    if call.argument(3, "bias") is not None:
        return "it has a bias"
    return Form("Tk,Ekn->Tn", [left, right])


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
    **dict.fromkeys(words(_CASTS), _like_first),
    "linear": _plain("*k,nk,+n->*n", "input", "weight", "bias"),
    **dict.fromkeys(words("matmul mm mv bmm dot"), _matmul),
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "outer": _plain("m,n->mn", "input", "vec2"),
    "einsum": _einsum,
    "groupedmm": _grouped_products,
    "scaleddotproductattention": _attention,
    "embedding": _embedding,
    **dict.fromkeys(words("layernorm rmsnorm"), _normalised),
    "groupnorm": _grouped_norm,
    **dict.fromkeys(words("batchnorm batchnorm1d batchnorm2d batchnorm3d"), _batch_norm),
    **{f"conv{kind}{n}d": _convolution for kind in ("", "transpose") for n in (1, 2, 3)},
    **{
        f"{kind}pool{n}d": _pool
        for kind in ("max", "avg", "lp", "adaptiveavg", "adaptivemax")
        for n in (1, 2, 3)
    },
    **dict.fromkeys(words("interpolate upsample"), _pool),
    **dict.fromkeys(words("softmax logsoftmax cumsum cumprod logcumsumexp"), _over_one),
    **dict.fromkeys(words("sort topk"), _with_indices),
    "sum": _reduced(summed=True),
    **dict.fromkeys(
        words("mean amax amin max min var std prod any all logsumexp argmax argmin"),
        _reduced(summed=False),
    ),
    **VIEWS,
}  # fmt: skip
