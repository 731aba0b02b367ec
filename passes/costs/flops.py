"""Floating-point operations of one op's forward, as a formula in the microbatch size.

The matmul family counts a multiply-add as two operations, exactly as torch's own
FlopCounterMode does (which counts nothing else); other ops count what they do per element, so
that an element-wise model has a cost as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from pdcompile.ir.graph import Op, size_at
from pdcompile.passes.costs.costed_op import CostedOp, plain_name, words

Formula = Callable[[CostedOp], int]


@dataclass(frozen=True, slots=True)
class Rule:
    """The cost of one kind of op: operations of its forward, and how backward and reads differ.

    `product`: of the matmul family, whose backward is a product of the same size for each factor.
    `backward`: operations of the backward for each of the forward, where it is neither that nor as
    many as the forward's.
    `looks_up`: it reads no more than what it returns.
    """

    flops: Formula
    product: bool = False
    backward: float | None = None
    looks_up: bool = False


def rule_of(call: CostedOp) -> Rule:
    """The rule of an op by its name; a function without one computes once for each result."""
    if call.is_view:
        return _PLACES
    if call.op.opaque:
        return Rule(_opaque)
    return _RULES.get(call.name, Rule(_made(1)))


def is_product(op: Op) -> bool:
    """True if the op is of the matmul family, whose factors an autocast region casts."""
    return _RULES.get(plain_name(op), Rule(_nothing)).product


def forward_flops(call: CostedOp) -> int:
    """Floating-point operations of the forward; 0 for views and for ops that only move data."""
    return rule_of(call).flops(call)


def _nothing(call: CostedOp) -> int:
    return 0


def _made(price: int) -> Formula:
    """Formula of so many operations for each element of the result."""
    return lambda call: price * call.out.elements


def _read(price: int) -> Formula:
    """Formula of so many operations for each element that is read."""
    return lambda call: price * call.first.elements


def _matmul(call: CostedOp) -> int:
    """(…, n, k) @ (…, k, m): 2·k for every element of the result."""
    left = call.tensor(0, "input") or call.first
    return 2 * left.shape[-1] * call.out.elements if left.shape else 0


def _grouped(call: CostedOp) -> int:
    """Rows of a part's own experts, where rows are spread evenly."""
    weight, ends = call.tensor(1, "mat_b"), call.tensor(2, "offs")
    if weight is None or ends is None:
        return _matmul(call)
    return _matmul(call) * weight.shape[0] // ends.elements


def _addmm(call: CostedOp) -> int:
    left = call.tensor(1, "mat1") or call.tensor(1, "batch1") or call.first
    return 2 * left.shape[-1] * call.out.elements


def _addbmm(call: CostedOp) -> int:
    left = call.tensor(1, "batch1") or call.first
    return 2 * left.shape[0] * left.shape[-1] * call.out.elements


def _bilinear(call: CostedOp) -> int:
    weight = call.tensor(2, "weight")
    if weight is None:
        return call.out.elements
    rows = prod(call.out.shape[:-1])
    return 2 * rows * weight.elements


def _convolution(call: CostedOp) -> int:
    """Every output element is a product over one kernel window of one group's channels."""
    weight = call.tensor(1, "weight")
    if weight is None or len(weight.shape) < 3:
        return call.out.elements
    spatial = len(weight.shape) - 2
    batched = len(call.out.shape) == spatial + 2
    rows = call.out.shape[0] if batched else 1
    # A transposed convolution walks over its input instead of its output.
    walked = call.first if "transpose" in call.name else call.out
    return 2 * rows * prod(walked.shape[-spatial:]) * weight.elements


def _attention(call: CostedOp) -> int:
    """Scores and their product with the values: two batched matrix products, mask or not."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    if query is None or key is None or value is None:
        return call.out.elements
    heads, (length, size) = prod(query.shape[:-2]), query.shape[-2:]
    return 2 * heads * length * key.shape[-2] * (size + value.shape[-1])


def _multihead(call: CostedOp) -> int:
    """torch.nn.MultiheadAttention: three input projections, attention, one output projection."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    if query is None or key is None or value is None or len(query.shape) < 2:
        return call.out.elements
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
    steps = prod(call.first.shape[:-1])
    matrices = [o for o in call.inputs if o.of_model and len(o.shape) == 2]
    return 2 * steps * sum(matrix.elements for matrix in matrices)


def _einsum(call: CostedOp) -> int:
    """Twice the product of all index sizes for each contraction of two operands."""
    equation = next((a for a in call.op.args if isinstance(a, str)), None)
    if equation is None:
        return call.out.elements
    terms = equation.replace(" ", "").split("->")[0].split(",")
    operands = call.inputs
    if "." in equation or len(terms) != len(operands) or len(terms) < 2:
        return call.out.elements
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        sizes.update(zip(term, operand.shape, strict=False))
    return 2 * (len(terms) - 1) * prod(tuple(sizes.values()))


def _interpolate(call: CostedOp) -> int:
    mode = call.argument(3, "mode", "nearest")
    return call.out.elements * (8 if mode != "nearest" else 0)


def _opaque(call: CostedOp) -> int:
    """The counted operations, or a product of each parameter with all rows of the first input."""
    if call.op.flops is not None:
        return size_at(call.op.flops, call.index.b)
    rows = prod(call.first.shape[:-1])
    weights = [o for o in call.inputs if o.of_model]
    return 2 * rows * sum(weight.elements for weight in weights) + call.out.elements


_PLACES = Rule(_nothing)


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(words(names), rule)


# A transcendental function is some ten operations.
_RULES: dict[str, Rule] = {
    **_named(
        _PLACES,
        "contiguous clone copy cat concat stack repeat repeatinterleave tile to float half double "
        "bfloat16 int long bool type typeas getitem setitem roll flip pad zeros ones full empty "
        "zeroslike oneslike fulllike emptylike newzeros newones newfull newempty arange linspace "
        "tensor onehot maskedfill scatter tril triu fill zero indexcopy indexput maskedselect "
        "pixelshuffle pixelunshuffle channelshuffle",
    ),
    **_named(Rule(_nothing, looks_up=True), "embedding indexselect gather index take"),
    "embeddingbag": Rule(_made(1), looks_up=True),
    **_named(
        Rule(_made(8)), "layernorm groupnorm instancenorm rmsnorm localresponsenorm batchnorm "
        "batchnorm1d batchnorm2d batchnorm3d syncbatchnorm",
    ),
    **_named(
        Rule(_made(10)), "exp log tanh sigmoid sin cos erf logsigmoid softplus silu mish rand "
        "randn bernoulli randlike randnlike multinomial normal",
    ),
    **_named(
        Rule(_made(12)), "gelu pow softmax logsoftmax elu selu expm1 log1p dropout dropout1d "
        "dropout2d alphadropout featurealphadropout",
    ),
    **_named(
        Rule(_read(1)), "sum mean var std max min amax amin norm argmax argmin prod any all cumsum "
        "nllloss mseloss l1loss smoothl1loss huberloss kldiv vectornorm binarycrossentropy sort "
        "topk varmean softmaxcrossentropy",
    ),
    # Pools look at every input element once: kernels rarely overlap by much.
    **{
        f"{kind}pool{n}d": Rule(_read(1))
        for kind in ("max", "avg", "lp", "adaptiveavg", "adaptivemax")
        for n in (1, 2, 3)
    },
    "logsumexp": Rule(_read(12)),
    **_named(Rule(_read(14)), "crossentropy binarycrossentropywithlogits"),
    **_named(Rule(_interpolate), "interpolate upsample"),
    **_named(Rule(_matmul, product=True), "linear matmul mm bmm mv dot inner vdot"),
    "groupedmm": Rule(_grouped, product=True),
    **_named(Rule(_addmm, product=True), "addmm baddbmm addmv"),
    "addbmm": Rule(_addbmm, product=True),
    **_named(Rule(_made(1), product=True), "outer ger"),
    "bilinear": Rule(_bilinear, product=True),
    **_named(
        Rule(_convolution, product=True), "conv1d conv2d conv3d convtranspose1d convtranspose2d "
        "convtranspose3d convolution",
    ),
    # Five products to the forward's two: its backward computes the scores again.
    "scaleddotproductattention": Rule(_attention, product=True, backward=2.5),
    "multiheadattention": Rule(_multihead, product=True),
    **_named(Rule(_recurrent, product=True), "lstm gru rnn lstmcell grucell rnncell"),
    "einsum": Rule(_einsum, product=True),
}  # fmt: skip
