"""An OpGraph as a torch.fx GraphModule that behaves like the model it came from."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from pdcompile.batch import FlatCall, flatten_call, unflatten_output
from pdcompile.eager.module_copies import twins
from pdcompile.errors import InputError, TraceError
from pdcompile.ir.fx_program import Program, program_of
from pdcompile.ir.records import SizeRange
from pdcompile.ir.value_checks import check_leaf, failed_check
from pdcompile.warn import warn

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph

_OF_THE_GRAPH = ("_graph", "_code", "_tracer_cls", "_tracer_extras")  # attributes of torch.fx


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


class CapturedModule(fx.GraphModule):
    """Takes the model's args and kwargs, returns its output pytree, draws in its order.

    Parameters and buffers are the model's own objects under all their names; leaf modules are
    copies that share them, so that train() and eval() do not reach into the model.
    """

    call: _Call
    program: Program
    other: tuple[Program, Callable[..., Any]]  # of the other mode
    modes: tuple[bool, dict[nn.Module, bool]]  # of the model when it was captured, of its parts

    def train(self, mode: bool = True) -> CapturedModule:
        """Switches the mode; in the captured one every module gets the mode that it had."""
        captured, own = self.modes
        for module in self.modules():
            module.training = own.get(module, mode) if mode == captured else mode
        return self

    def __deepcopy__(self, memo: Any = None) -> CapturedModule:
        twin = CapturedModule(nn.Module(), fx.Graph())
        memo = {} if memo is None else memo
        memo.update({id(self): twin, id(self.program): self.program, id(self.other): self.other})
        graph = self.graph
        own = {name: part for name, part in vars(self).items() if name not in _OF_THE_GRAPH}
        vars(twin).update(copy.deepcopy(own, memo))
        twin.graph = graph
        return twin

    def recompile(self) -> Any:
        code = super().recompile()
        type(self).forward = _outer(type(self).forward)
        return code


def to_module(graph: OpGraph, model: nn.Module | None = None) -> CapturedModule:
    """A torch.fx GraphModule that computes what the captured model computes.

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
    return build(graph, origin.eval if graph.training else origin.train, model)


def build(graph: OpGraph, other: OpGraph | None, model: nn.Module) -> CapturedModule:
    """The GraphModule for a graph and the graph of the model's other mode, if there is one."""
    program = program_of(graph)
    module = CapturedModule(nn.Module(), fx.Graph())
    _copy_tree(model, module)
    for fqn, tensor in graph.tensor_values.items():
        _place_constant(module, fqn, tensor)
    module.program = program
    module.train(graph.training)
    if other is None:
        module.other = (program, _no_other_mode)
    else:
        second = program_of(other)
        module.other = (second, type(fx.GraphModule(module, second.fx_graph)).forward)
    module.graph = program.fx_graph
    return module


def _outer(generated: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: CapturedModule, *args: Any, **kwargs: Any) -> Any:
        program, run = self.program, generated
        if self.training != program.graph.training:
            program, run = self.other
        return _call(self, program, run, args, kwargs)

    return forward


def _no_other_mode(*args: Any) -> Any:
    raise TraceError(
        "only one mode of this model was captured",
        remedy="call train() or eval() to return to it, or build the module from a Capture",
    )


def _call(
    module: CapturedModule, program: Program, run: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    graph = program.graph
    tensors, size = _checked(program, flatten_call(module.call, args, kwargs))
    lookup: dict[str, Callable[[str], Any]] = {
        "b": lambda _: size,
        "device": lambda _: tensors[0].device if tensors else torch.device("cpu"),
        "module": module.get_submodule,
        "tensor": lambda fqn: _tensor(module, fqn),
    }
    extras = [lookup[kind](name) for kind, name in program.extras]
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            found = run(module, *tensors, *extras)
        except AssertionError as error:
            refused = failed_check(error, graph.ops)
            if refused is None:
                raise
            raise refused from error
    output: Any = unflatten_output(found, graph.output_spec)
    return output


_OTHER = "capture it again, with an example of this kind"


def _checked(program: Program, flat: FlatCall) -> tuple[list[Tensor], int]:
    """The tensors in the order of the placeholders, and the number of samples.

    Raises:
        InputError: the graph is not the model for this call.
    """
    graph = program.graph
    defaults = {name: p.default for name, p in flat.spec.signature.parameters.items()}
    for path, text in graph.constants:
        if repr(flat.leaves.get(path, defaults.get(path))) != text:
            raise InputError(f"the model was captured with {text} here", where=path, remedy=_OTHER)
    known = {path for path, _ in graph.constants} | {entry.path for entry in graph.inputs}
    for path, leaf in flat.leaves.items():
        if path not in known and leaf is not defaults.get(path, leaf) and leaf is not None:
            raise InputError("the model was captured without this input", where=path, remedy=_OTHER)
    tensors = []
    size = None
    for entry in program.inputs:
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
        tensors.append(leaf)
    if size is not None and not graph.sizes.holds(size):
        _other_size(graph.sizes, size)
    return tensors, graph.batch_size if size is None else size


def _other_size(known: SizeRange, size: int) -> None:
    """Refuses a number of samples with which the model computes differently; warns of others."""
    reason = known.below if size < known.smallest else known.above
    count = f"{known.smallest}" if known.is_one else f"{known.smallest} to {known.largest}"
    told = f"the graph was captured for {count} samples, got {size}"
    if reason:
        raise InputError(f"{told}: {reason}", where="the batch size", remedy=_OTHER)
    warn(f"{told}, which was not tried: capture it with an example of {size} to be sure")


class _Call(nn.Module):
    """Stands for the model in `flatten_call`, which reads the signature of forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()

        def forward(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
        self.forward = forward


# The model's names.


def _copy_tree(model: nn.Module, root: CapturedModule) -> None:
    """Give `root` the model's modules, parameters and buffers, under all of their names."""
    copies = twins(model)
    top = copies[id(model)]
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        root.__dict__[name] = copy.copy(vars(top)[name])
    root.__dict__["call"] = _Call(model)
    modes = {copies[id(module)]: module.training for module in model.modules()}
    root.modes = (model.training, {**modes, root: model.training})


def _place_constant(root: nn.Module, fqn: str, tensor: torch.Tensor) -> None:
    path, _, name = fqn.rpartition(".")
    owner: nn.Module = root
    for part in path.split(".") if path else ():
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        child = owner._modules[part]
        assert child is not None
        owner = child
    if not hasattr(owner, name):
        owner.__dict__[name] = tensor


def _tensor(module: nn.Module, fqn: str) -> torch.Tensor:
    path, _, name = fqn.rpartition(".")
    return getattr(module.get_submodule(path), name)  # type: ignore[no-any-return]
