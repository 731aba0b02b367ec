"""What autograd keeps of one op until its backward: which tensors, and how much besides.

The rules follow torch's CPU kernels (derivatives of 2.13).  A rule names tensors of the graph
(its inputs or its output) and adds bytes that are in no value of the graph: dropout masks,
statistics of norms, intermediate results of composite functions.  Whether a tensor that is
named costs anything is decided over the whole graph (`pdcompile.passes.costs.storages`): a
storage counts once, parameters and graph inputs never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdcompile.ir.graph import DTYPE_BYTES, Attr, Ref, walk
from pdcompile.passes.costs.costed_op import CostedOp, Number, Operand, product, words


@dataclass(frozen=True, slots=True)
class Saved:
    """Tensors of the graph that stay alive, and bytes that no value of the graph stands for."""

    operands: tuple[Operand, ...] = ()
    extra_bytes: Number = 0


Rule = Callable[[CostedOp], Saved]
NOTHING = Saved()
INDEX_BYTES = 8


def saved(call: CostedOp) -> Saved:
    """What the op keeps; nothing when autograd does not record it."""
    if not call.requires_grad or call.is_view:
        return NOTHING
    if call.op.saved_bytes is not None:
        return Saved(call.inputs, call.index.size(call.op.saved_bytes))
    if call.op.opaque:
        return Saved(call.inputs + call.outputs, sum(output.bytes for output in call.outputs))
    rule = _RULES.get(call.name)
    if rule is not None:
        return rule(call)
    # A function without a rule: what a generic derivative needs, its floating-point operands.
    return Saved(
        tuple(o for o in call.inputs if o.dtype.startswith(("float", "bfloat", "complex")))
    )


def has_rule(call: CostedOp) -> bool:
    """Whether the answer follows torch's derivative, rather than a guess that is on the safe side.

    Fused recurrent and attention modules pick their kernels by rules of their own.
    """
    if call.is_view or not call.requires_grad:
        return True
    return call.op.kind != "opaque" and call.name in _RULES and call.name not in _GUESSES


_GUESSES = words("lstm gru rnn lstmcell grucell rnncell multiheadattention")


def _nothing(call: CostedOp) -> Saved:
    return NOTHING


def _input(call: CostedOp) -> Saved:
    return Saved((call.first,))


def _output(call: CostedOp) -> Saved:
    return Saved((call.out,))


def _both(call: CostedOp) -> Saved:
    return Saved((call.first, call.out))


def _input_or_output(call: CostedOp) -> Saved:
    """In-place activations overwrite their input and differentiate through their output."""
    return _output(call) if call.in_place else _input(call)


def _operands(call: CostedOp) -> Saved:
    return Saved(call.inputs)


def _product(call: CostedOp) -> Saved:
    factors = call.inputs[:2]
    if len(factors) < 2:
        squared = len(walk(call.op.args, Ref)) + len(walk(call.op.args, Attr)) > 1
        return Saved(factors) if squared else NOTHING
    left, right = factors
    batched = call.name == "matmul" and max(len(left.shape), len(right.shape)) > 3
    return _folded(_for_each_other(left, right), 2 if batched else None)


def _folded(kept: list[Operand], dims: int | None) -> Saved:
    """A layout whose leading dims do not fold is copied first, and the copy is kept."""
    copied = [o for o in kept if dims is not None and not o.folds(dims)]
    rest = tuple(o for o in kept if all(o is not c for c in copied))
    return Saved(rest, sum(operand.bytes for operand in copied))


def _linear(call: CostedOp) -> Saved:
    weight = call.tensor(1, "weight")
    if weight is None:
        return _input(call)
    rows = _folded([call.first] if weight.requires_grad else [], 1)
    kept = (weight,) if call.first.requires_grad else ()
    return Saved((*rows.operands, *kept), rows.extra_bytes)


def _addmm(call: CostedOp) -> Saved:
    factors = [o for o in (call.tensor(1, "mat1"), call.tensor(2, "mat2")) if o is not None]
    return Saved(tuple(_for_each_other(*factors))) if len(factors) == 2 else NOTHING


def _for_each_other(left: Operand, right: Operand) -> list[Operand]:
    """Each factor is kept for the gradient of the other one."""
    return ([left] if right.requires_grad else []) + ([right] if left.requires_grad else [])


def _convolution(call: CostedOp) -> Saved:
    weight = call.tensor(1, "weight")
    return Saved((call.first,) if weight is None else (call.first, weight))


def _divide(call: CostedOp) -> Saved:
    operands = call.inputs
    if len(operands) < 2:
        return NOTHING
    top, bottom = operands[:2]
    return Saved((top, bottom) if bottom.requires_grad else (bottom,))


def _power(call: CostedOp) -> Saved:
    if len(call.inputs) < 2:
        return _input(call)
    return Saved((*call.inputs[:2], call.out) if call.inputs[1].requires_grad else call.inputs[:2])


def _indices(call: CostedOp) -> Saved:
    """Integer and boolean operands: where the gradient goes."""
    return Saved(tuple(o for o in call.inputs if not _floating(o)))


def _chosen(call: CostedOp) -> Saved:
    """max, min, sort, topk over a dim: their indices; over everything: input and result."""
    chosen = tuple(o for o in call.outputs if not _floating(o))
    if chosen:
        return Saved(chosen)
    if any(not call.index.graph.values[name].is_tensor for name in call.op.outputs):
        return Saved((), call.out.elements * INDEX_BYTES)
    return _both(call)


def _dropout(call: CostedOp) -> Saved:
    """The scaled mask, in the input's dtype; nothing is drawn in eval mode or at p = 0."""
    inactive = call.op.kind == "module" and not call.index.graph.training
    inactive = inactive or call.argument(2, "training", True) is False
    if inactive or call.argument(1, "p", 0.5) == 0:
        return NOTHING
    return Saved((), call.first.bytes)


def _channel_dropout(call: CostedOp) -> Saved:
    """One mask entry a channel."""
    mask = _dropout(call)
    shape = call.first.shape
    return Saved((), mask.extra_bytes and product(shape[:2]) * DTYPE_BYTES[call.first.dtype])


def _normalised_rows(call: CostedOp) -> Number:
    shape = call.argument(1, "normalized_shape")
    dims = len(shape) if isinstance(shape, tuple) else len(getattr(shape, "items", (0,)))
    return product(call.first.shape[: len(call.first.shape) - dims])


def _statistics(call: CostedOp, count: Number) -> Saved:
    """The input, and so many numbers of its dtype: mean and reciprocal deviation of a group."""
    return Saved((call.first,), count * DTYPE_BYTES[call.first.dtype])


def _layer_norm(call: CostedOp) -> Saved:
    return _statistics(call, 2 * _normalised_rows(call))


def _group_norm(call: CostedOp) -> Saved:
    return _statistics(call, 2 * call.first.shape[0] * call.argument(1, "num_groups", 1))


def _batch_norm(call: CostedOp) -> Saved:
    """Statistics of every channel when it is training."""
    shape = call.first.shape
    training = call.argument(5, "training", call.op.kind == "module" and call.index.graph.training)
    tracked = call.argument(-1, "track_running_stats", True)
    channels = shape[1] if len(shape) > 1 else 1
    return _statistics(call, 2 * channels if training or not tracked else 0)


def _instance_norm(call: CostedOp) -> Saved:
    """Statistics of every channel of every sample."""
    return _statistics(call, 2 * product(call.first.shape[:2]))


def _rms_norm(call: CostedOp) -> Saved:
    """The reciprocal root mean square of every row; with a weight the normalised input too."""
    scaled = call.first.elements if call.tensor(2, "weight") is not None else 0
    return _statistics(call, _normalised_rows(call) + scaled)


def _input_and_buffer(call: CostedOp) -> Saved:
    return Saved((call.first,), call.first.bytes)


def _difference(call: CostedOp) -> Saved:
    """The mean of absolute differences keeps the differences."""
    return Saved((), call.first.bytes)


def _target(call: CostedOp) -> Saved:
    return Saved(tuple(o for o in call.inputs[1:2]))


def _max_pool(call: CostedOp) -> Saved:
    return Saved((call.first,), call.out.elements * INDEX_BYTES)


def _adaptive_average(call: CostedOp) -> Saved:
    """To size 1 it is a mean, which keeps nothing."""
    size = call.argument(1, "output_size")
    sizes = size if isinstance(size, tuple) else getattr(size, "items", (size,))
    return NOTHING if all(s == 1 for s in sizes) else _input(call)


def _cross_entropy(call: CostedOp) -> Saved:
    """Log-probabilities (a new tensor), the target, and the weight of all rows."""
    target = call.tensor(1, "target")
    kept = (target,) if target is not None else ()
    return Saved(kept, call.first.bytes + DTYPE_BYTES[call.first.dtype])


def _nll_loss(call: CostedOp) -> Saved:
    return Saved(call.inputs, DTYPE_BYTES[call.first.dtype])


def _attention(call: CostedOp) -> Saved:
    """Flash attention keeps q, k, v, the result and one number a row; the other path its scores."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    if query is None or key is None or value is None:
        return _operands(call)
    mask = call.tensor(3, "attn_mask")
    dropout = call.argument(4, "dropout_p", 0.0)
    rows = product(query.shape[:-1])
    if len(query.shape) == 4 and not dropout and not (mask is not None and mask.requires_grad):
        kept = (query, key, value, call.out, *(() if mask is None else (mask,)))
        accumulate = 8 if query.dtype == "float64" else 4
        return Saved(kept, rows * accumulate)
    scores = rows * key.shape[-2] * DTYPE_BYTES[query.dtype]
    # Scaled copies of q and k, the probabilities, and with dropout its mask and its result.
    # Heads cut out of one projection do not fold into rows: v is copied then.
    rows_of_v = Saved((), value.bytes) if call.index.is_part(value) else _folded([value], 2)
    extra = query.bytes + key.bytes + scores * (3 if dropout else 1) + rows_of_v.extra_bytes
    return Saved(rows_of_v.operands, extra)


def _recurrent(call: CostedOp) -> Saved:
    """Gates and states of every step; each layer's result is the next one's input.

    The workspace of an LSTM's CPU kernel also has room for gradients of the states.
    """
    steps = product(call.first.shape[:-1])
    recurrent = [
        o for o in call.inputs if o.held and o.name.rsplit(".", 1)[-1].startswith("weight_hh")
    ]
    states = 12 if call.name == "lstm" else 2
    gates = sum(o.shape[0] + states * o.shape[1] for o in recurrent)
    return Saved((call.first,), steps * gates * DTYPE_BYTES[call.first.dtype])


def _multihead(call: CostedOp) -> Saved:
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    if query is None or key is None or value is None:
        return _operands(call)
    # Projected q, k, v and the heads' result beside the inputs.
    return Saved((query, key, value), 2 * query.bytes + key.bytes + value.bytes)


def _floating(operand: Operand) -> bool:
    return operand.dtype.startswith(("float", "bfloat", "complex"))


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(words(names), rule)


_RULES: dict[str, Rule] = {
    **_named(
        _nothing,
        "add sub neg pos sum mean contiguous clone copy cat concat concatenate stack to float "
        "double half bfloat16 type typeas repeat tile roll flip rot90 pad constantpad cumsum "
        "interpolate upsample pixelshuffle pixelunshuffle tril triu zero fill zeros ones round "
        "floor ceil trunc sign reflectionpad2d replicationpad2d setitem reshape trace diag conj "
        "broadcasttensors meshgrid channelshuffle fold",
    ),
    **_named(
        _input,
        "gelu silu mish hardswish softplus glu softshrink log log2 log10 log1p sin cos abs square "
        "erf clamp clip clampmin clampmax hardtanh relu6 hardsigmoid avgpool1d avgpool2d "
        "avgpool3d sinh cosh atan asin acos var",
    ),
    **_named(_input_or_output, "leakyrelu elu celu selu rrelu threshold"),
    **_named(
        _output, "relu sigmoid tanh softmax logsoftmax exp sqrt rsqrt reciprocal expm1 exp2 tan "
        "softmin"
    ),
    **_named(_both, "std prod cumprod norm vectornorm amax amin logsumexp"),
    **_named(_product, "mul matmul mm bmm mv dot inner outer ger einsum tensordot vdot kron"),
    **_named(_addmm, "addmm baddbmm addbmm addmv"),
    "linear": _linear,
    **_named(
        _convolution,
        "conv1d conv2d conv3d convtranspose1d convtranspose2d convtranspose3d convolution",
    ),
    "div": _divide,
    "pow": _power,
    **_named(
        _indices, "embedding embeddingbag indexselect gather index where maskedfill scatter "
        "scatteradd take takealongdim getitem indexadd indexput maskedselect maskedscatter"
    ),
    **_named(_chosen, "max min sort topk median mode argsort kthvalue cummax cummin"),
    **_named(_dropout, "dropout alphadropout"),
    **_named(_channel_dropout, "dropout1d dropout2d dropout3d featuredropout featurealphadropout"),
    "logsigmoid": _input_and_buffer,
    "l1loss": _difference,
    "kldiv": _target,
    "layernorm": _layer_norm,
    "rmsnorm": _rms_norm,
    **_named(_instance_norm, "instancenorm instancenorm1d instancenorm2d instancenorm3d"),
    "groupnorm": _group_norm,
    **_named(_batch_norm, "batchnorm batchnorm1d batchnorm2d batchnorm3d syncbatchnorm"),
    **_named(_max_pool, "maxpool1d maxpool2d maxpool3d adaptivemaxpool2d"),
    **_named(_adaptive_average, "adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d"),
    "crossentropy": _cross_entropy,
    "nllloss": _nll_loss,
    **_named(
        _operands, "mseloss smoothl1loss huberloss binarycrossentropy prelu lerp "
        "binarycrossentropywithlogits maximum minimum atan2 addcmul addcdiv bilinear gridsample"
    ),
    "scaleddotproductattention": _attention,
    "multiheadattention": _multihead,
    **_named(_recurrent, "lstm gru rnn lstmcell grucell rnncell"),
}  # fmt: skip
