"""The same models through torch's own front ends, judged by the same rule: equal to eager or not.

Each gets what it is best at: one process, one minibatch, training mode with dropout, equal random
state.  Compared bit for bit: the outputs' tensors, the loss, the gradient of every parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdcompile.batch.step_result import own_loss
from tests.zoo.case import Case, Entry, build
from tests.zoo.check import DROPOUT

# exact | wrong (another result, or none that a user would notice) | refused (an error)
Front = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Callable[..., Any]]


def symbolic_trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.fx; arguments that the call leaves out are constants."""
    import inspect

    signature = inspect.signature(model.forward)
    given = signature.bind(*args, **kwargs).arguments
    left_out = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in given and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    try:
        return torch.fx.symbolic_trace(model, concrete_args=left_out or None)
    except Exception:
        return torch.fx.symbolic_trace(model)


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.export, not strict."""
    return torch.export.export(model, args, kwargs, strict=False).module()


def pipelining(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.distributed.pipelining, cut in the middle of the longest list of modules."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    middle = _middle(model)
    pipe = pipeline(model, args, kwargs, split_spec={middle: SplitPoint.BEGINNING})
    if pipe.num_stages < 2:
        raise RuntimeError(f"no cut before {middle}")
    # Its own executor detaches at every stage, as its schedules do; gradients have to flow here.
    pipe.executor = torch.fx.Interpreter(pipe.split_gm)
    return pipe


FRONTS: dict[str, Front] = {
    "torch.fx.symbolic_trace": symbolic_trace,
    "torch.export": export,
    "torch.distributed.pipelining": pipelining,
}


def judge(entry: Entry, front: Front) -> tuple[str, str]:
    """(exact | wrong | refused, the first difference or the first line of the error)."""
    case = build(entry, DROPOUT)
    inputs = case.inputs(0)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    state = {name: value.clone() for name, value in case.model.named_buffers()}
    expected = _outcome(case, case.model, args, kwargs)
    _restore(case.model, state)
    try:
        made = front(case.model, args, kwargs)
    except Exception as error:
        return "refused", _first(error)
    _restore(case.model, state)
    try:
        found = _outcome(case, made, args, kwargs)
    except Exception as error:
        return "refused", f"when run: {_first(error)}"
    for name, value in expected.items():
        other = found.get(name)
        if (value is None) != (other is None):
            return "wrong", f"{name} is missing"
        if value is not None and other is not None and not _same(value, other):
            return "wrong", f"{name} differs"
    return "exact", ""


def _outcome(
    case: Case, call: Callable[..., Any], args: Any, kwargs: Any
) -> dict[str, Tensor | None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        output = call(*args, **kwargs)
        if call is not case.model and isinstance(output, tuple) and len(output) == 1:
            (output,) = output  # pipelining makes a tuple of a lone tensor
        loss = _loss(output) if case.loss_fn is None else case.loss_fn(output, case.target(0))
        case.model.zero_grad(set_to_none=True)
        names = dict(call.named_parameters()) if isinstance(call, nn.Module) else {}
        for parameter in names.values():
            parameter.grad = None
        loss.backward()
    found: dict[str, Tensor | None] = {"loss": loss.detach().clone()}
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    found |= {f"output {i}": leaf.detach().clone() for i, leaf in enumerate(tensors)}
    gradients = {_plain(name): parameter.grad for name, parameter in names.items()}
    for name, parameter in case.model.named_parameters():
        gradient = gradients.get(name, parameter.grad)
        found[f"gradient {name}"] = None if gradient is None else gradient.clone()
    return found


def _loss(output: Any) -> Tensor:
    """The loss that the model returns; where names were lost, the first scalar."""
    scalars = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    found = own_loss(output)
    return found if found is not None else next(leaf for leaf in scalars if leaf.ndim == 0)


def _plain(name: str) -> str:
    """Name without what torch's pipelining puts in front."""
    return re.sub(r"^split_gm\.(submod_\d+\.)?", "", name)


def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.all((one == other) | ((one != one) & (other != other))))


def _middle(model: nn.Module) -> str:
    """The middle element of the longest list or sequence of modules, or of the children."""
    lists = [
        (len(module), path)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    length, path = max(lists, key=lambda pair: (pair[0], -len(pair[1])), default=(0, ""))
    if length > 1:
        return f"{path}.{length // 2}".lstrip(".")
    children = [name for name, _ in model.named_children()]
    return children[len(children) // 2]


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]
