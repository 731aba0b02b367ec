"""Capturing small models in tests, and checking that a capture is the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall, flatten_call, resize, resolve_batch
from pdcompile.ir.graph import Capture, Op
from pdcompile.passes.stages.capture_file import _digest
from pdcompile.passes.trace import capture
from tests.helpers import models
from tests.helpers.fidelity import compare


def make(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A model with a linear layer `lin` (8 to 8), the given parts and the given forward.

    Plain tensors among the parts become buffers.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            for name, part in parts.items():
                if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Model.forward = forward  # type: ignore[method-assign]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def rows(count: int = 4, width: int = 8, seed: int = 0) -> Tensor:
    """A batch of vectors."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def captured(
    model: nn.Module,
    *args: Any,
    loss_fn: Any = None,
    target: Any = None,
    microbatch_size: int | None = None,
    autocast: str | None = None,
    **kwargs: Any,
) -> Capture:
    """Capture a model on one call (by default of four rows) and check that nothing changed."""
    flat = flatten_call(model, args or (rows(),), kwargs, target)
    before = _state(model)
    layout = resolve_batch(flat)
    found = capture(
        model, flat, layout, loss_fn, microbatch_size=microbatch_size, autocast=autocast
    )
    _assert_same(before, _state(model))
    return found


def faithful(
    model: nn.Module,
    *args: Any,
    loss_fn: Any = None,
    target: Any = None,
    sizes: tuple[int, ...] = (1, 4, 6),
    **kwargs: Any,
) -> Capture:
    """Capture, and compare with eager at several microbatch sizes; the model stays as it was."""
    flat = flatten_call(model, args or (rows(),), kwargs, target)
    layout = resolve_batch(flat)
    before = _state(model)
    found = capture(model, flat, layout, loss_fn)
    for size in sizes:
        compare(model, found, resize(flat, layout, size), BatchLayout(size, layout.dims))
    _assert_same(before, _state(model))
    return found


def op_named(found: Capture, name: str) -> Op:
    """The op of the train graph with this name."""
    return next(op for op in found.train.ops if op.name == name)


def targets(found: Capture) -> list[str]:
    """Targets of the train graph's ops, last parts."""
    return [op.target.rpartition(".")[2] for op in found.train.ops]


def _state(model: nn.Module) -> dict[str, Any]:
    tensors = {
        name: (tensor, tensor.detach().clone(), tensor._version, getattr(tensor, "grad", None))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    attributes = {
        path: {
            name: (value, list(value) if isinstance(value, list | dict) else None)
            for name, value in vars(module).items()
        }
        for path, module in model.named_modules()
    }
    return {
        "tensors": tensors,
        "attributes": attributes,
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "call": nn.Module.__call__,
        "apply": torch.autograd.Function.__dict__["apply"],
        "setattr": nn.Module.__setattr__,
    }


def _assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["python"] == after["python"]
    assert torch.equal(before["torch"], after["torch"])
    for name in ("call", "apply", "setattr"):
        assert before[name] is after[name]
    assert list(before["tensors"]) == list(after["tensors"])
    for name, (tensor, copy, _, grad) in before["tensors"].items():
        same, now, _, grad_now = after["tensors"][name]
        assert tensor is same
        assert tensor.device.type == "meta" or torch.equal(copy, now)
        assert grad is grad_now
    for path, attributes in before["attributes"].items():
        now = after["attributes"][path]
        assert list(attributes) == list(now)
        for name, (value, content) in attributes.items():
            assert now[name][0] is value or now[name][0] == value
            assert now[name][1] == content


#: modules whose models, like those of transformers, are told apart by what they print, their
#: numbers and their configurations
KNOWN = (
    *(models.__name__, "tests.helpers.exported", "tests.helpers.divided"),
    *("examples.gpt", "examples.kimi", "examples.switch"),
    "pdcompile.cli.self_test",
)
_ONCE: dict[Any, tuple[Capture, nn.Module]] = {}


def capture_once(
    model: nn.Module, flat: FlatCall, layout: BatchLayout, loss_fn: Any, **options: Any
) -> Capture:
    """`capture`, shared by all calls with equal shapes of models that look alike.

    Only for those whose ops follow from their modules, numbers and shapes: those of `KNOWN`, and
    classes with `captured_once`, without hooks but functions with it after a forward.  Any other
    is captured each time.
    """
    if not all(_follows(module) for module in model.modules()):
        return capture(model, flat, layout, loss_fn, **options)
    state = model.state_dict(keep_vars=True)
    ties = {id(tensor): name for name, tensor in state.items()}
    key = (
        repr(model),
        *((_numbers(module), *module._forward_hooks.values()) for module in model.modules()),
        *((name, ties[id(t)], t.requires_grad, *_kind(t)) for name, t in state.items()),
        *((name, *_kind(leaf)) for name, leaf in flat.leaves.items()),
        *(repr(layout), loss_fn, *options.items()),
    )
    if key not in _ONCE:
        _ONCE[key] = capture(model, flat, layout, loss_fn, **options), model
    return _ONCE[key][0]


def _follows(module: nn.Module) -> bool:
    kind, own = type(module), vars(module)
    after = module._forward_hooks
    hooks = [one for name, one in own.items() if name.endswith("_hooks") and one is not after]
    hooks += [one for one in after.values() if not hasattr(one, "captured_once")]
    for tensor in module.parameters(recurse=False):
        hooks += [tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)]
    if "forward" in own or any(hooks):
        return False
    home = kind.__module__
    known = home in KNOWN or home.startswith(("torch.nn.", "transformers."))
    return known or "captured_once" in vars(kind)


def _numbers(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    plain = ((name, one) for name, one in own.items() if isinstance(one, int | float | str | tuple))
    return (*plain, repr(vars(own["config"]) if "config" in own else ""))


def _kind(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, Tensor):
        return (leaf,)
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device


def digest_once(path: str) -> str:
    """The digest of a file, of one of an installed package as it was when it was first read."""
    return _digest_of_package(path) if "site-packages" in path else _digest(path)


_digest_of_package = cache(_digest)
