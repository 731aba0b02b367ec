"""An OpGraph as a module that behaves like the model it came from."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pdcompile.batch import FlatCall, flatten_call, unflatten_output
from pdcompile.batch.call import TARGET
from pdcompile.eager.module_copies import twins
from pdcompile.errors import InputError, TraceError
from pdcompile.ir.execution import CPU, Lookup, execute, materialise
from pdcompile.ir.records import LeftOut, Ref, leaves, walk
from pdcompile.ir.value_checks import check_leaf, failed_check
from pdcompile.warn import warn

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph


@dataclass(slots=True)
class Origin:
    """The origin of a capture: the model while it lives, loss_fn, the graphs of both modes."""

    model: Callable[[], nn.Module | None] = lambda: None
    train: OpGraph | None = None
    eval: OpGraph | None = None
    loss_fn: Callable[..., Any] | None = None
    autocast: str | None = None  # the region around model and loss_fn
    # Integers of the example that the model may refuse others for: by path, nested lists.
    integers: dict[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Origin, ())  # a graph that travels to another process leaves its model behind


class CapturedModule(nn.Module):
    """Takes the model's args and kwargs, returns its output pytree, draws in its order.

    Parameters and buffers are the model's own objects under all their names; leaf modules are
    copies that share them, so that train() and eval() do not reach into the model.
    """

    def __init__(self, graph: OpGraph, other: OpGraph | None, model: nn.Module) -> None:
        """`other`: the graph of the model's other mode, if there is one."""
        super().__init__()
        copies = twins(model)
        top = vars(copies[id(model)])
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = copy.copy(top[name])
        self._signature = inspect.signature(model.forward)
        self._graphs = {one.training: one for one in (graph, other) if one is not None}
        self._captured = model.training
        self._modes = {copies[id(one)]: one.training for one in model.modules()}
        self.train(graph.training)

    def train(self, mode: bool = True) -> CapturedModule:
        """Switches the mode; in the captured one every module gets the mode that it had."""
        self.training = mode
        for module in self._modes:
            module.training = self._modes[module] if mode == self._captured else mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what the model does.

        Raises:
            InputError: the graph is not the model for this call.
            TraceError: only the other mode was captured.
        """
        graph = self._graphs.get(self.training)
        if graph is None:
            raise TraceError(
                "only one mode of this model was captured",
                remedy="call train() or eval() to return to it, or build the module from a Capture",
            )
        tensors, size = _checked(graph, flatten_call(self, args, kwargs, signature=self._signature))
        device = next((one.device for one in tensors.values()), CPU)
        lookup = Lookup(self, size, device, graph.tensor_values)
        kept = {ref.name for ref in walk(graph.output, Ref)}
        try:
            values = execute(graph, tensors, lookup, kept=kept)
        except AssertionError as error:
            refused = failed_check(error, graph.ops)
            if refused is None:
                raise
            raise refused from error
        found = [
            None if isinstance(leaf, LeftOut) else materialise(leaf, values, lookup)
            for leaf in leaves(graph.output)
        ]
        output: Any = unflatten_output(found, graph.output_spec)
        return output


def to_module(graph: OpGraph, model: nn.Module | None = None) -> CapturedModule:
    """A module that computes what the captured model computes, op by op.

    The same args and kwargs in, the same output pytree out; parameters and buffers are the
    model's own, under all their names; train() and eval() switch between the two captures;
    random numbers come from torch's default generator in the model's order.  The ops of
    loss_fn are left out.

    Args:
        graph: the mode to begin in.
        model: the model that has the tensors; None: the captured one.

    Raises:
        TraceError: no model is given and the captured one is gone.
    """
    origin: Origin = graph.origin or Origin()
    model = model if model is not None else origin.model()
    if model is None:
        raise TraceError(
            "the model that this graph was captured from is gone",
            remedy="pass a model with the same parameters: graph.to_module(model)",
        )
    return CapturedModule(graph, origin.eval if graph.training else origin.train, model)


_OTHER = "capture it again, with an example of this kind"


def _checked(graph: OpGraph, flat: FlatCall) -> tuple[dict[str, Tensor], int]:
    """The tensors by value name, and the number of samples.

    Raises:
        InputError: the graph is not the model for this call; warns of a size that was not tried.
    """
    defaults = {name: p.default for name, p in flat.spec.signature.parameters.items()}
    for path, text in graph.constants:
        if repr(flat.leaves.get(path, defaults.get(path))) != text:
            raise InputError(f"the model was captured with {text} here", where=path, remedy=_OTHER)
    taken = {path for path, _ in graph.constants} | {entry.path for entry in graph.inputs}
    for path, leaf in flat.leaves.items():
        if path not in taken and leaf is not defaults.get(path, leaf) and leaf is not None:
            raise InputError("the model was captured without this input", where=path, remedy=_OTHER)
    tensors = {}
    size = None
    for entry in graph.inputs:
        if re.match(rf"{TARGET}($|\W)", entry.path):
            continue  # which the loss_fn takes
        leaf = flat.leaves.get(entry.path)
        if not isinstance(leaf, Tensor):
            raise InputError("an input tensor is missing", where=entry.path, remedy=_OTHER)
        # Another precision may do: the module may be converted.
        check_leaf(graph, entry, leaf, _OTHER, same_kind=True)
        if entry.batch_dim is not None:
            found = leaf.shape[entry.batch_dim]
            size = found if size is None else size
            if size != found:
                raise InputError(
                    f"this input has {found} samples, and others have {size}",
                    where=entry.path,
                    remedy="pass inputs of as many samples each",
                )
        tensors[entry.name] = leaf
    if size is not None and not (known := graph.sizes).holds(size):
        reason = known.below if size < known.smallest else known.above
        count = f"{known.smallest}" if known.is_one else f"{known.smallest} to {known.largest}"
        told = f"the graph was captured for {count} samples, got {size}"
        if reason:
            raise InputError(f"{told}: {reason}", where="the batch size", remedy=_OTHER)
        warn(f"{told}, which was not tried: capture it with an example of {size} to be sure")
    return tensors, graph.batch_size if size is None else size
