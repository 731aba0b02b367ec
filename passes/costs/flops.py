"""Floating-point operations of one op's forward, as a formula in the microbatch size.

The matmul family counts a multiply-add as two operations, exactly as torch's own
FlopCounterMode does (which counts nothing else); other ops count what they do per element, so
that an element-wise model has a cost as well.
"""

from __future__ import annotations

from collections.abc import Callable

from pdcompile.passes.costs.costed_op import CostedOp, Operand, product, words

Formula = Callable[[CostedOp], int]

# Operations per element of the output; a transcendental function is some ten of them.
_PER_ELEMENT = {
    **dict.fromkeys(words("layernorm groupnorm instancenorm rmsnorm localresponsenorm"), 8),
    **dict.fromkeys(words("batchnorm batchnorm1d batchnorm2d batchnorm3d syncbatchnorm"), 8),
    **dict.fromkeys(words("exp log tanh sigmoid sin cos erf logsigmoid softplus silu mish"), 10),
    **dict.fromkeys(words("rand randn bernoulli randlike randnlike multinomial normal"), 10),
    **dict.fromkeys(words("gelu pow softmax logsoftmax elu selu expm1 log1p logsumexp"), 12),
    **dict.fromkeys(words("dropout dropout1d dropout2d alphadropout featurealphadropout"), 12),
    **dict.fromkeys(words("crossentropy binarycrossentropywithlogits"), 14),
}

# Ops that only place data: bytes, no arithmetic.
MOVES = words(
    "contiguous clone copy cat concat stack repeat repeatinterleave tile to float half bfloat16 "
    "double int long bool type typeas gather indexselect index getitem setitem embedding roll flip "
    "pad zeros ones full empty zeroslike oneslike fulllike emptylike newzeros newones newfull "
    "newempty arange linspace tensor onehot maskedfill scatter take tril triu fill zero "
    "indexcopy indexput maskedselect pixelshuffle pixelunshuffle channelshuffle"
)  # fmt: skip


def forward_flops(call: CostedOp) -> int:
    """Floating-point operations of the forward; 0 for views and for ops that only move data."""
    if call.is_view:
        return 0
    if call.op.opaque:
        return call.index.size(call.op.flops) if call.op.flops is not None else _opaque(call)
    formula = _FORMULAS.get(call.name)
    if formula is not None:
        return formula(call)
    if call.name in MOVES:
        return 0
    return pointwise(call)


def is_product(call: CostedOp) -> bool:
    """Whether the op is of the matmul family, whose backward is products of the same size."""
    if call.op.opaque or call.is_view:
        return False
    return call.name in _FORMULAS and call.name not in _REDUCTIONS


def pointwise(call: CostedOp) -> int:
    """Elements of the largest tensor that the op touches, times the price of the function."""
    reduced = call.name in _READS_MORE
    tensors = (call.first,) if reduced else (call.out,)
    return _PER_ELEMENT.get(call.name, 1) * tensors[0].elements


_READS_MORE = words(
    "sum mean var std max min amax amin norm argmax argmin prod any all cumsum logsumexp "
    "crossentropy nllloss mseloss l1loss smoothl1loss huberloss kldiv vectornorm "
    "binarycrossentropy binarycrossentropywithlogits sort topk varmean softmaxcrossentropy"
)  # fmt: skip


def _matmul(call: CostedOp) -> int:
    """(…, n, k) @ (…, k, m): 2·k for every element of the result."""
    left = call.tensor(0, "input") or call.first
    return 2 * left.shape[-1] * call.out.elements if left.shape else 0


def _addmm(call: CostedOp) -> int:
    left = call.tensor(1, "mat1") or call.tensor(1, "batch1") or call.first
    return 2 * left.shape[-1] * call.out.elements


def _addbmm(call: CostedOp) -> int:
    left = call.tensor(1, "batch1") or call.first
    return 2 * left.shape[0] * left.shape[-1] * call.out.elements


def _outer_product(call: CostedOp) -> int:
    return call.out.elements


def _bilinear(call: CostedOp) -> int:
    weight = call.tensor(2, "weight")
    if weight is None:
        return pointwise(call)
    rows = product(call.out.shape[:-1])
    return 2 * rows * weight.elements


def _convolution(call: CostedOp) -> int:
    """Every output element is a product over one kernel window of one group's channels."""
    weight = call.tensor(1, "weight")
    if weight is None or len(weight.shape) < 3:
        return pointwise(call)
    spatial = len(weight.shape) - 2
    batched = len(call.out.shape) == spatial + 2
    rows = call.out.shape[0] if batched else 1
    # A transposed convolution walks over its input instead of its output.
    walked = call.first if "transpose" in call.name else call.out
    return 2 * rows * product(walked.shape[-spatial:]) * weight.elements


def attention_flops(query: Operand, key: Operand, value: Operand) -> int:
    """Scores and their product with the values: two batched matrix products, mask or not."""
    heads = product(query.shape[:-2])
    length, size = query.shape[-2:]
    return 2 * heads * length * key.shape[-2] * (size + value.shape[-1])


def _attention(call: CostedOp) -> int:
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    if query is None or key is None or value is None:
        return pointwise(call)
    return attention_flops(query, key, value)


def _multihead(call: CostedOp) -> int:
    """torch.nn.MultiheadAttention: three input projections, attention, one output projection."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    if query is None or key is None or value is None or len(query.shape) < 2:
        return pointwise(call)
    embed = query.shape[-1]
    projections = 2 * embed * (
        2 * query.elements + key.elements + value.elements
    )  # fmt: skip
    if len(query.shape) == 2:
        rows, length, source = 1, query.shape[0], key.shape[0]
    elif call.argument(-1, "batch_first", False):
        rows, length, source = query.shape[0], query.shape[1], key.shape[1]
    else:
        length, rows = query.shape[:2]
        source = key.shape[0]
    return projections + 4 * rows * length * source * embed


def _recurrent(call: CostedOp) -> int:
    """Every weight matrix meets every time step of every sequence once."""
    steps = product(call.first.shape[:-1])
    matrices = [o for o in call.inputs if o.held and len(o.shape) == 2]
    return 2 * steps * sum(matrix.elements for matrix in matrices)


def _einsum(call: CostedOp) -> int:
    """Twice the product of all index sizes for each contraction of two operands."""
    equation = next((a for a in call.op.args if isinstance(a, str)), None)
    if equation is None:
        return pointwise(call)
    terms = equation.replace(" ", "").split("->")[0].split(",")
    operands = call.inputs
    if "." in equation or len(terms) != len(operands) or len(terms) < 2:
        return pointwise(call)
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        sizes.update(zip(term, operand.shape, strict=False))
    return 2 * (len(terms) - 1) * product(tuple(sizes.values()))


def _pool(call: CostedOp) -> int:
    """Every input element is looked at once (kernels rarely overlap by much)."""
    return call.first.elements


def _interpolate(call: CostedOp) -> int:
    mode = call.argument(3, "mode", "nearest")
    return call.out.elements * (8 if mode != "nearest" else 0)


def _opaque(call: CostedOp) -> int:
    """An opaque module: its parameters as matrices that meet every row of the first input."""
    rows = product(call.first.shape[:-1])
    weights = [o for o in call.inputs if o.held]
    return 2 * rows * sum(weight.elements for weight in weights) + call.out.elements


_CONVOLUTIONS = [f"conv{kind}{n}d" for kind in ("", "transpose") for n in (1, 2, 3)]
_POOLS = ("max", "avg", "lp", "adaptiveavg", "adaptivemax")
_REDUCTIONS = frozenset(f"{kind}pool{n}d" for kind in _POOLS for n in (1, 2, 3)) | {
    "interpolate",
    "upsample",
}

_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "dot", "inner", "vdot"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _addmm),
    "addbmm": _addbmm,
    **dict.fromkeys(("outer", "ger"), _outer_product),
    "bilinear": _bilinear,
    **dict.fromkeys((*_CONVOLUTIONS, "convolution"), _convolution),
    "scaleddotproductattention": _attention,
    "multiheadattention": _multihead,
    **dict.fromkeys(("lstm", "gru", "rnn", "lstmcell", "grucell", "rnncell"), _recurrent),
    "einsum": _einsum,
    **dict.fromkeys(_REDUCTIONS - {"interpolate", "upsample"}, _pool),
    **dict.fromkeys(("interpolate", "upsample"), _interpolate),
}
