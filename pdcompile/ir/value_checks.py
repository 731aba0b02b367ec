"""Checks in a graph, of values that the model's Python read during capture.

A check is an op ``torch._assert(value, message)`` where capture went on with the only value with
which the model does not raise, or with the value of the example.  A training step is checked for
that it would train something.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pdcompile.errors import ConfigError, InputError, some
from pdcompile.ir.execution import Lookup, run_op
from pdcompile.ir.records import CHECK, GraphInput, Op, size_at
from pdcompile.ir.targets import dtype_name

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph


CAPTURED = "captured for inputs with which"


def failed_check(error: BaseException, ops: Iterable[Op]) -> InputError | None:
    """The InputError for the error of a failed check; None for any other error."""
    if not isinstance(error, AssertionError):
        return None
    failed = [op for op in ops if op.target == CHECK and op.args[1] == str(error)]
    return refused(failed[0]) if failed else None


def refused(check: Op) -> InputError:
    """The error of a failed check."""
    message = str(check.args[1]).partition(": ")[2]
    if message.startswith(CAPTURED):
        return InputError(
            f"the model was {message}, and with this minibatch it is not",
            where=check.source,
            remedy="prepare with an example in which it varies from sample to sample, make another "
            "pipeline for such minibatches, or decide in tensors (torch.where)",
        )
    return InputError(
        f"the model refuses this minibatch: {message}",
        where=check.source,
        remedy="mend the input, or what the model computes from it",
    )


def check_inputs(graph: OpGraph, leaves: Mapping[str, Any], b: int) -> None:
    """Runs the checks of the graph that depend on inputs alone, for one microbatch.

    Args:
        leaves: the call's leaves by path; checks that read a missing one are left out.
        b: samples of the microbatch.

    Raises:
        InputError: a value is not what the model was captured for; names the user's line.
    """
    given = {
        entry.name: leaves[entry.path]
        for entry in graph.inputs
        if isinstance(leaves.get(entry.path), Tensor)
    }
    found: set[str] = set()  # checks that need these inputs alone, and what makes their values
    for i, check in enumerate(graph.ops):
        if check.target == CHECK:
            before, read = needed_ops(graph.ops[:i], check.inputs, graph.storage_of)
            if read <= given.keys() and all(is_pure(op) and not op.attributes for op in before):
                found.update((check.name, *(op.name for op in before)))
    ops = [op for op in graph.ops if op.name in found]
    if any(op.mutates for op in ops):  # the caller's own tensors stay as they are
        given = {name: tensor.clone() for name, tensor in given.items()}
    env: dict[str, Any] = dict(given)
    device = next((tensor.device for tensor in given.values()), torch.device("cpu"))
    lookup = Lookup(nn.Module(), b, device)
    with torch.no_grad():
        for op in ops:
            if op.target != CHECK:
                env[op.name] = run_op(op, env, lookup)
            elif not env[op.inputs[0]]:
                raise refused(op)


def check_leaf(
    graph: OpGraph, entry: GraphInput, leaf: Tensor, remedy: str, *, same_kind: bool = False
) -> None:
    """Raises InputError unless a tensor has the shape and dtype of the captured input.

    `same_kind`: another precision of the dtype is accepted.
    """
    value = graph.values[entry.name]
    expected = [size_at(size, graph.batch_size) for size in value.shape]
    same = len(expected) == leaf.dim() and all(
        dim == entry.batch_dim or size == leaf.shape[dim] for dim, size in enumerate(expected)
    )
    captured = getattr(torch, value.dtype)
    alike = _kind(leaf.dtype) == _kind(captured) if same_kind else leaf.dtype == captured
    if same and alike:
        return
    text = ", ".join("b" if d == entry.batch_dim else str(n) for d, n in enumerate(expected))
    raise InputError(
        f"this input is {dtype_name(leaf.dtype)} {tuple(leaf.shape)}, captured was "
        f"{value.dtype} ({text})",
        where=entry.path,
        remedy=remedy,
    )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype is torch.bool


def is_pure(op: Op) -> bool:
    """True if the op depends on its arguments alone: no modules or draws."""
    return op.kind in ("function", "method", "getattr") and op.draw is None


def needed_ops(
    ops: Sequence[Op],
    names: Collection[str],
    storage_of: Callable[[str], int],
    inputs_of: Callable[[Op], Collection[str]] = lambda op: op.inputs,
) -> tuple[list[Op], set[str]]:
    """(the ops that these values depend on after all `ops`, the values that none of these makes).

    Ops that write in place into a needed value are among them.

    Args:
        storage_of: equal for values that share memory, -1 where there is none.
        inputs_of: the inputs whose values an op needs.
    """
    wanted = set(names)
    storages = {storage_of(name) for name in names} - {-1}
    found: list[Op] = []
    for op in reversed(ops):
        writes = any(storage_of(name) in storages for name in op.mutates)
        if op.name not in wanted and not writes:
            continue
        found.append(op)
        new = (*inputs_of(op), *op.mutates)
        wanted.update(new)
        storages.update(storage_of(name) for name in new)
        storages.discard(-1)
    return found[::-1], wanted - {op.name for op in found}


_INT8 = ("int8", "uint8")
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
    frozen = [fqn for fqn, info in graph.tensors.items() if info.dtype in _INT8]
    if frozen and not any(info.requires_grad for info in graph.tensors.values()):
        raise ConfigError(
            "nothing that the model reads requires a gradient, and 8-bit integers, which torch "
            "gives none, cannot be updated by an optimizer",
            where=some(frozen),
            remedy="train float parameters beside them (LoRA: examples/int8.py); " + _EVALUATE,
        )
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


def note_without_loss(graph: OpGraph) -> Iterator[str]:
    """A note where a plan is for training, and there is nothing to train on."""
    if graph.training and graph.loss is None:
        yield (
            "there is no loss_fn, and the model returns no loss: steps are refused, and backwards "
            "are planned all the same; for inference plan with schedule='forward' (--schedule "
            "forward)"
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
    ops, _ = needed_ops(graph.ops, [name], graph.storage_of)
    return ops[::-1]
