"""Checks that a training step of a captured model would train something."""

from __future__ import annotations

from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Op, OpGraph
from pdcompile.ir.value_checks import needed_ops

_EVALUATE = "to evaluate only, call eval_step or predict"


def check_trained(graph: OpGraph) -> None:
    """Raises ConfigError where backward reaches no parameter, or there is no loss.

    Args:
        graph: the capture in train mode.
    """
    if graph.loss is None:
        raise ConfigError(
            "the model's output has no loss in it",
            remedy="give loss_fn=(output, target) -> scalar, or return a scalar, an output "
            "with .loss or a dict with 'loss'",
        )
    if graph.values[graph.loss].needs_gradient:
        return
    parameters = [info for info in graph.tensors.values() if info.kind == "parameter"]
    if not parameters:
        raise ConfigError("forward reads no parameters: there is nothing to train",
                          remedy=_EVALUATE)  # fmt: skip
    if not any(info.requires_grad for info in parameters):
        raise ConfigError(
            "no parameter required a gradient when the model was captured: nothing would be "
            "trained",
            remedy="call requires_grad_() on what is to be trained, before compile; " + _EVALUATE,
        )
    lost = _where_lost(graph)
    raise ConfigError(
        "the loss does not depend on any parameter through autograd: nothing would be trained",
        where=None if lost is None else f"{lost.source} ({lost.target.rpartition('.')[2]})",
        remedy="leave out what ends the gradient there (detach, no_grad, item, argmax, rounding); "
        + _EVALUATE,
    )


def check_loss(graph: OpGraph) -> None:
    """Raises ConfigError for a loss that depends on no input and no tensor of the model."""
    if graph.loss is None:
        return
    before = {op.name for op in _leading_to(graph, graph.loss)}
    given = {entry.name for entry in graph.inputs}
    for op in graph.ops:
        if op.name in before and (op.attributes or op.parameters or given & set(op.inputs)):
            return
    raise ConfigError(
        "the loss is a constant: it depends on no input, target or parameter",
        where="loss_fn" if any(op.region == "loss" for op in graph.ops) else "the model's output",
        remedy="compute it from the model's output, as a tensor",
    )


def _where_lost(graph: OpGraph) -> Op | None:
    """The last op before the loss whose inputs have a gradient and whose result has none."""
    assert graph.loss is not None
    trained = {fqn for fqn, info in graph.tensors.items() if info.requires_grad}
    for op in _leading_to(graph, graph.loss):
        reads = any(graph.values[name].requires_grad for name in op.inputs)
        if (reads or trained & {*op.parameters, *op.attributes}) and not (
            graph.values[op.name].requires_grad
        ):
            return op
    return None


def _leading_to(graph: OpGraph, name: str) -> list[Op]:
    """The ops that a value is computed from, last one first."""
    ops, _ = needed_ops(graph.ops, [name], lambda value: graph.values[value].storage)
    return ops[::-1]
