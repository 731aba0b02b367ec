"""Compares one block of the model with its generated class, with memory for that block alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import output_leaves
from pdcompile.eager.autocast import autocast_region
from pdcompile.eager.randomness import DrawScope, preserved_rng
from pdcompile.errors import VerifyError
from pdcompile.hardware import devices
from pdcompile.ir import opaque
from pdcompile.ir.graph import Argument, Attr, OpGraph, Ref, size_at
from pdcompile.ir.stage_interface import StageInterface
from pdcompile.passes.codegen.block_calls import BlockCall
from pdcompile.passes.costs.costed_op import laid_out
from pdcompile.passes.stages.chain import announce, fill
from pdcompile.passes.trace.comparison.content_watch import line_of_traceback
from pdcompile.passes.trace.comparison.step_values import StepValues
from pdcompile.passes.trace.tape.observer import source_of_class
from pdcompile.passes.verify.module_calls import Hole, ModuleCall
from pdcompile.passes.verify.verification import Compared, Difference, counted, differences
from pdcompile.plan import Plan
from pdcompile.weights import slots


@dataclass
class BlockTensors:
    """Tensors for a block's inputs, weights and buffers, each made once, by name.

    Inputs of the call and tensors that the model has in memory are copied; others are made up:
    small random numbers for floating point, 0 for integers, which is a valid index.
    """

    graph: OpGraph
    leaves: Mapping[str, Any]  # of one microbatch, by path
    owned: Mapping[str, Tensor]  # the model's tensors and constants, by every name
    b: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    made: dict[Argument, Tensor] = field(default_factory=dict)

    def __call__(self, place: Argument) -> Tensor:
        if place not in self.made:
            self.made[place] = self._make(place)
        return self.made[place]

    def known(self, hole: Hole) -> Argument:
        """The place of a hole, for which a tensor is made now if the graph does not have it."""
        place = hole.place
        if isinstance(place, Ref) and place.name not in self.graph.values:
            self.made.setdefault(place, self._random(hole.shape, hole.dtype, 1.0))
        return place

    def _make(self, place: Argument) -> Tensor:
        if isinstance(place, Attr):
            known = self.owned.get(place.fqn)
            if known is None:
                raise VerifyError(f"the model has no tensor {place.fqn!r}")
            if not known.is_meta:
                return known.detach().clone()
            scale = 1.0 / max(known.shape[-1], 1) ** 0.5 if known.ndim > 1 else 1.0
            return self._random(known.shape, known.dtype, scale)
        assert isinstance(place, Ref)
        value = self.graph.values[place.name]
        path = next((e.path for e in self.graph.inputs if e.name == place.name), None)
        leaf = self.leaves.get(path) if path is not None else None
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            return leaf.detach().clone()
        dtype = getattr(torch, value.dtype)
        shape = [size_at(size, self.b) for size in value.shape]
        return laid_out(shape, value.stride_order, lambda s: self._random(s, dtype, 1.0))

    def _random(self, shape: Any, dtype: torch.dtype, scale: float) -> Tensor:
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype)
        real = torch.float64 if dtype == torch.float64 else torch.float32
        made = torch.empty(shape, dtype=real).uniform_(0.1, 1.0, generator=self.generator)
        return (made * scale).to(dtype)


@dataclass
class BlockComparison:
    """Compares a block of the model with its generated class, on the same tensors.

    `stage`: the generated stage, on the meta device; of it only `path` gets memory.  `call`: the
    call of the generated block; `eager_call`: that of the model's module.
    """

    model: nn.Module
    stage: nn.Module
    interface: StageInterface
    path: str
    call: BlockCall
    eager_call: ModuleCall
    given: BlockTensors
    plan: Plan

    def __post_init__(self) -> None:
        self.graph = self.given.graph
        fqns = {name: slot.fqn for slot in slots(self.model).values() for name in slot.names}
        self.eager = _eager(self.model, self.path, fqns, self.given).train(self.graph.training)
        named = (*self.eager.named_parameters(), *self.eager.named_buffers())
        self.own = {fqns[f"{self.path}.{name}"]: tensor for name, tensor in named}
        opaque.bind(self.stage, self.interface, self.model)
        # The stage's block, holding the very tensors of the model's module.
        block = self.stage.get_submodule(self.path)
        fill(block, self.path, self.interface, lambda fqn: self._tensor(Attr(fqn)))
        self.generated = block.train(self.graph.training)

    def run(self) -> tuple[list[Difference], Compared]:
        """Runs both, forward and backward.

        Raises:
            VerifyError: its inputs cannot be made up, its results not compared, or a side fails.
        """
        index = self.interface.index
        device = next((tensor.device for tensor in self.own.values()), devices.HOST)
        with preserved_rng(device), torch.set_grad_enabled(self.graph.training):
            expected = _side(self._eager_side, "the model's own module", None)
            got = _side(self._generated_side, "the generated block", f"stage_{index}.py")
        both = {name: one for name, one in expected.outputs.items() if name in got.outputs}
        if not both:
            raise VerifyError("none of its results can be compared")
        expected = replace(expected, outputs=both)
        kind = type(self.eager)
        home = dict.fromkeys((*expected.gradients, *expected.buffers), index)
        where = f"block {self.path!r} ({kind.__qualname__}, {source_of_class(kind)})"
        found = differences(self.graph, expected, got, home, index, exact=True, first=where)
        return found, counted(expected, self.graph, 0, self.given.b)

    def _tensor(self, place: Argument) -> Tensor:
        if isinstance(place, Attr) and place.fqn in self.own:
            return self.own[place.fqn]
        return self.given(place)

    def _inputs(self) -> dict[str, Tensor]:
        fresh = {}
        for name in self.call.inputs:
            value = self.graph.values[name]
            if not value.is_tensor:
                raise VerifyError(f"it takes the container {name!r}")
            tensor = self.given(Ref(name)).clone(memory_format=torch.preserve_format)
            fresh[name] = tensor.requires_grad_(value.requires_grad and self.graph.training)
        return fresh

    def _eager_side(self) -> StepValues:
        entered = self._inputs()
        written = {name: tensor.view_as(tensor) for name, tensor in entered.items()}

        def fill(hole: Hole) -> Tensor:
            place = self.given.known(hole)
            name = place.name if isinstance(place, Ref) else ""
            return written[name] if name in written else self._tensor(place)

        args, kwargs = self.eager_call.filled(fill)
        scope = DrawScope(self.eager, self.plan.training.seed, 0, 0)
        modules = self.eager.named_modules(prefix=self.path)
        scope._names = {id(module): name for name, module in modules}
        with scope:
            with autocast_region(self.plan.training.autocast):
                result = self.eager(*args, **kwargs)
            named = {
                place.name: leaf
                for place, leaf in zip(self.eager_call.results, output_leaves(result), strict=True)
                if isinstance(place, Ref) and isinstance(leaf, Tensor)
            }
            return self._ended(named, entered)

    def _generated_side(self) -> StepValues:
        entered, seed = self._inputs(), self.plan.training.seed
        signature = self.interface.train if self.graph.training else self.interface.eval
        _, hooks = announce(self.stage, self.interface, signature, seed)
        try:
            with autocast_region(self.plan.training.autocast):
                arguments = [tensor.view_as(tensor) for tensor in entered.values()]
                arguments += [self._tensor(Attr(fqn)) for fqn in self.call.tensors]
                result = self.generated(*arguments)
        finally:
            for hook in hooks:
                hook.remove()
        results = result if isinstance(result, tuple) else (result,)
        return self._ended(dict(zip(self.call.outputs, results, strict=True)), entered)

    def _ended(self, outputs: dict[str, Tensor], entered: dict[str, Tensor]) -> StepValues:
        """Runs the backward of a side and copies its results; buffers are then restored."""
        # A module may also return results through an object among its arguments (a cache of keys).
        returned = {place.name for place in self.eager_call.results if isinstance(place, Ref)}
        roots = [name for name in self.call.outputs if name in outputs and name in returned]
        if self.graph.training:
            _backward([outputs[name] for name in roots])
        own = self.own.items()
        gradients = {name: t.grad for name, t in entered.items() if t.requires_grad}
        gradients |= {fqn: t.grad for fqn, t in own if isinstance(t, nn.Parameter)}
        found = StepValues(
            {name: outputs[name].detach().clone() for name in roots},
            None,
            gradients,
            {fqn: t.detach().clone() for fqn, t in own if not t.requires_grad},
        )
        with torch.no_grad():
            for fqn, tensor in own:
                tensor.grad = None
                if not tensor.requires_grad:
                    tensor.copy_(self.given(Attr(fqn)))
        return found


def _side(run: Any, who: str, where: str | None) -> StepValues:
    """Runs one side; raises its errors as VerifyErrors that name it."""
    try:
        return run()  # type: ignore[no-any-return]
    except VerifyError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise VerifyError(
            f"{who} fails on made-up inputs: {type(error).__name__}: {first}",
            where=line_of_traceback(error) or where,
        ) from error


def _backward(outputs: Iterable[Tensor]) -> None:
    """Runs backward on gradients that differ from entry to entry, the same on both sides."""
    roots = [one for one in outputs if one.requires_grad]
    ramps = [torch.linspace(-1, 1, max(root.numel(), 1), dtype=torch.float32) for root in roots]
    gradients = [r.to(root.dtype).reshape(root.shape) for r, root in zip(ramps, roots, strict=True)]
    if roots:
        torch.autograd.backward(roots, gradients)


def _eager(model: nn.Module, path: str, fqns: Mapping[str, str], given: BlockTensors) -> nn.Module:
    """A copy of the model's module with memory of its own."""
    original = model.get_submodule(path)
    memo: dict[int, Any] = {}
    for name, tensor in (*original.named_parameters(), *original.named_buffers()):
        made = given(Attr(fqns[f"{path}.{name}"])).clone()
        memo[id(tensor)] = (
            nn.Parameter(made, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else made
        )
    return copy.deepcopy(original, memo)
