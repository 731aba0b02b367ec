"""Records the arguments of chosen modules in the model's forward, with the graph's tensor names.

The model runs on fake tensors, as in capture, so that it needs no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall, follow_batch, output_leaves
from pdcompile.ir.graph import Argument, Attr, OpGraph, Ref
from pdcompile.passes.trace.attempt import one_recording
from pdcompile.passes.trace.subject import Subject
from pdcompile.passes.trace.tape.tape import Tape
from pdcompile.releases.torch_internals import NoTorchFunction, function_modes


@dataclass(frozen=True, slots=True, eq=False)
class Hole:
    """The place of a tensor in arguments: a value of the graph, or a tensor of the model.

    Shape and dtype are for values that the graph does not have because no op needs them.
    """

    place: Argument
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Noting(dict[int, Any]):
    """A memo of deepcopy that notes which of its entries were used."""

    def __init__(self, holes: Mapping[int, Hole]) -> None:
        super().__init__(holes)
        self.used: dict[int, Hole] = {}

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        if isinstance(found, Hole):
            self.used[key] = found
        return found


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module, tensors replaced by holes; `results` name the tensors it returned,
    in the order of `pdcompile.batch.output_leaves`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    holes: tuple[Hole, ...]
    results: tuple[Argument | None, ...]

    def filled(self, tensor: Callable[[Hole], Tensor]) -> tuple[Any, Any]:
        """(args, kwargs) with tensors in the holes; objects among them are copies."""
        memo: dict[int, Any] = {id(hole): tensor(hole) for hole in self.holes}
        args, kwargs = copy.deepcopy((self.args, self.kwargs), memo)
        return args, kwargs


def module_calls(
    model: nn.Module,
    graph: OpGraph,
    call: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    paths: Collection[str],
) -> dict[str, ModuleCall]:
    """The first call of each of the modules, in the mode of the graph.

    Args:
        call: one microbatch; layout: of the minibatch.

    Raises TraceError as capture does.
    """
    found: dict[str, ModuleCall] = {}
    opaque = tuple(dict.fromkeys(op.module_path for op in graph.ops if op.opaque))
    own = follow_batch(call, layout)
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_watched(model.get_submodule(path), path, found))
        one_recording(Subject(model, call, own, loss_fn), call, graph.training, opaque)
    return found


@contextmanager
def _watched(module: nn.Module, path: str, found: dict[str, ModuleCall]) -> Iterator[None]:
    entered: list[tuple[int, Any, Any, tuple[Hole, ...]]] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        recorder = _recorder()
        if recorder is None or any(key == id(recorder) for key, *_ in entered):
            return
        with NoTorchFunction():
            memo = _Noting(_holes(recorder))
            args, kwargs = copy.deepcopy((args, kwargs), memo)
        entered.append((id(recorder), args, kwargs, tuple(memo.used.values())))

    def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorder = _recorder()
        if recorder is None or not entered or entered[-1][0] != id(recorder):
            return
        with NoTorchFunction():
            known = _holes(recorder)
            results = tuple(
                known[id(leaf)].place if id(leaf) in known else None
                for leaf in output_leaves(output)
            )
        found[path] = ModuleCall(*entered[-1][1:], results)

    handles = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recorder() -> Tape | None:
    modes = function_modes()
    return next((mode for mode in reversed(modes) if isinstance(mode, Tape)), None)


def _holes(recorder: Tape) -> dict[int, Hole]:
    """Holes for the tensors that the run knows, by identity."""
    fakes = recorder.fakes
    places: dict[int, Argument] = {key: Attr(fqn) for key, fqn in fakes.table.fqns.items()}
    places.update((key, Attr(fqn)) for key, fqn in fakes._attribute.items())
    places.update((key, Ref(name)) for key, name in fakes.value_names.items())
    tensors = (*fakes.table.objects.values(), *fakes._fake_of.values(), *fakes.objects.values())
    known = {id(tensor): tensor for tensor in tensors}
    return {
        key: Hole(place, tuple(known[key].shape), known[key].dtype)
        for key, place in places.items()
        if key in known
    }
