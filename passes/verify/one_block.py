"""One block of the model against the class that was generated for it, with memory for it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import output_leaves
from pdcompile.eager.autocast import autocast_region
from pdcompile.eager.randomness import DrawScope, preserved_rng
from pdcompile.errors import VerifyError
from pdcompile.ir import opaque
from pdcompile.ir.graph import Argument, Attr, OpGraph, Ref, size_at
from pdcompile.ir.stage_interface import StageInterface
from pdcompile.passes.codegen.block_calls import BlockCall
from pdcompile.passes.stages.chain import announce
from pdcompile.passes.trace.facts import source_of_class
from pdcompile.passes.verify.module_calls import Hole, ModuleCall
from pdcompile.passes.verify.verification import Difference, distance
from pdcompile.passes.verify.watch import line_of_traceback
from pdcompile.plan import Plan


@dataclass
class Given:
    """Tensors in the place of a block's inputs, weights and buffers, each made once, by name.

    Values of the call are taken from it; what the model has in memory is copied; the rest is
    made up: small random numbers for floating point, 0 for integers, which index anything.
    """

    graph: OpGraph
    leaves: Mapping[str, Any]  # of one microbatch, by path
    owned: Mapping[str, Tensor]  # the model's tensors, by canonical FQN
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
            known = self.owned.get(place.fqn, self.graph.tensor_values.get(place.fqn))
            if known is None:
                raise VerifyError(f"{place.fqn!r} is no tensor of the model")
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
        shape = [size_at(size, self.b) for size in value.shape]
        order = value.stride_order or tuple(range(len(shape)))
        made = self._random([shape[dim] for dim in order], getattr(torch, value.dtype), 1.0)
        return made.permute([order.index(dim) for dim in range(len(order))])

    def _random(self, shape: Any, dtype: torch.dtype, scale: float) -> Tensor:
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype)
        real = torch.float64 if dtype == torch.float64 else torch.float32
        made = torch.empty(shape, dtype=real).uniform_(0.1, 1.0, generator=self.generator)
        return (made * scale).to(dtype)


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of the comparison gave: everything by name."""

    outputs: dict[str, Tensor]
    inputs: dict[str, Tensor | None]  # gradients
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def compare_block(
    model: nn.Module,
    stage: nn.Module,
    interface: StageInterface,
    graph: OpGraph,
    path: str,
    call: BlockCall,
    eager_call: ModuleCall,
    given: Given,
    plan: Plan,
) -> tuple[list[Difference], int, int]:
    """Run both on the same tensors, forward and backward.

    Args:
        stage: the generated stage, on the meta device; of it only `path` gets memory.
        call: what the generated block takes and gives; eager_call: the model's module.

    Returns (differences, outputs compared, gradients compared).

    Raises:
        VerifyError: what the module takes or returns cannot be made up, or a side fails.
    """
    fqns = _canonical(model)
    eager = _eager(model, path, fqns, given).train(graph.training)
    held = _by_fqn(eager, path, fqns)
    opaque.bind(stage, interface, model)
    generated = _materialised(stage, interface, path, held, given).train(graph.training)
    seed = plan.training.seed
    signature = interface.train if graph.training else interface.eval

    # A module may give out more through an object that it was handed, as a cache of keys does.
    returned = {place.name for place in eager_call.results if isinstance(place, Ref)}

    def inputs() -> dict[str, Tensor]:
        fresh = {}
        for name in call.inputs:
            value = graph.values[name]
            if not value.is_tensor:
                raise VerifyError(f"it takes the container {name!r}")
            tensor = given(Ref(name)).clone(memory_format=torch.preserve_format)
            fresh[name] = tensor.requires_grad_(value.requires_grad and graph.training)
        return fresh

    def ended(outputs: dict[str, Tensor], entered: dict[str, Tensor]) -> Side:
        roots = [name for name in call.outputs if name in outputs and name in returned]
        if graph.training:
            _backward({name: outputs[name] for name in roots}, given.b)
        side = Side(
            {name: outputs[name].detach().clone() for name in roots},
            {name: tensor.grad for name, tensor in entered.items() if tensor.requires_grad},
            {fqn: t.grad for fqn, t in held.items() if isinstance(t, nn.Parameter)},
            {fqn: t.detach().clone() for fqn, t in held.items() if not t.requires_grad},
        )
        with torch.no_grad():
            for fqn, tensor in held.items():
                tensor.grad = None
                if not tensor.requires_grad:
                    tensor.copy_(given(Attr(fqn)))
        return side

    def filling(entered: dict[str, Tensor]) -> Callable[[Hole], Tensor]:
        def fill(hole: Hole) -> Tensor:
            place = given.known(hole)
            if isinstance(place, Ref) and place.name in entered:
                return entered[place.name]
            return _tensor(place, held, given)

        return fill

    def run_eager() -> Side:
        entered = inputs()
        written = {name: tensor.view_as(tensor) for name, tensor in entered.items()}
        args, kwargs = eager_call.filled(filling(written))
        scope = DrawScope(eager, seed, 0, 0)
        scope._names = {id(m): f"{path}.{n}" if n else path for n, m in eager.named_modules()}
        with scope:
            with autocast_region(plan.training.autocast):
                result = eager(*args, **kwargs)
            named = {
                place.name: leaf
                for place, leaf in zip(eager_call.results, output_leaves(result), strict=True)
                if isinstance(place, Ref) and isinstance(leaf, Tensor)
            }
            return ended(named, entered)

    def run_generated() -> Side:
        entered = inputs()
        handles = announce(stage, signature, seed)
        opaque.announce(stage, interface, lambda: DrawScope(stage, seed, 0, 0))
        try:
            with autocast_region(plan.training.autocast):
                arguments = [tensor.view_as(tensor) for tensor in entered.values()]
                result = generated(*arguments, *(held_or(fqn) for fqn in call.tensors))
        finally:
            for handle in handles:
                handle.remove()
        results = result if isinstance(result, tuple) else (result,)
        return ended(dict(zip(call.outputs, results, strict=True)), entered)

    def held_or(fqn: str) -> Tensor:
        return _tensor(Attr(fqn), held, given)

    with preserved_rng(), torch.set_grad_enabled(graph.training):
        expected = _told(run_eager, "the model's own module", None)
        got = _told(run_generated, "the generated block", f"stage_{interface.index}.py")
    both = [name for name in expected.outputs if name in got.outputs]
    if not both:
        raise VerifyError("nothing that it returns can be told apart")
    where = f"{path!r} ({type(eager).__qualname__}, {source_of_class(type(eager))})"
    rows: list[tuple[str, str, Tensor | None, Tensor | None]] = [
        ("output", name, expected.outputs[name], got.outputs[name]) for name in both
    ]
    rows += [("gradient", name, g, got.inputs[name]) for name, g in expected.inputs.items()]
    rows += [("gradient", name, g, got.gradients[name]) for name, g in expected.gradients.items()]
    rows += [("buffer", name, t, got.buffers[name]) for name, t in expected.buffers.items()]
    mode = "train" if graph.training else "eval"
    found = [
        Difference(mode, what, name, interface.index, gap, 0, f"block {where}")
        for what, name, one, other in rows
        if (gap := distance(one, other, exact=True)) is not None
    ]
    return found, len(both), sum(what == "gradient" and one is not None for what, _, one, _ in rows)


def _told(run: Any, who: str, where: str | None) -> Side:
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


def _tensor(place: Argument, held: Mapping[str, Tensor], given: Given) -> Tensor:
    if isinstance(place, Attr) and place.fqn in held:
        return held[place.fqn]
    return given(place)


def _backward(outputs: Mapping[str, Tensor], b: int) -> None:
    """With gradients that differ from entry to entry, the same on both sides."""
    roots = [one for one in outputs.values() if one.requires_grad]
    if roots:
        gradients = []
        for root in roots:
            ramp = torch.linspace(-1, 1, max(root.numel(), 1), dtype=torch.float32)
            gradients.append(ramp.to(root.dtype).reshape(root.shape))
        torch.autograd.backward(roots, gradients)


def _canonical(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer to the canonical one."""
    first: dict[int, str] = {}
    found = {}
    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def _by_fqn(module: nn.Module, path: str, fqns: Mapping[str, str]) -> dict[str, Tensor]:
    pairs = (*module.named_parameters(), *module.named_buffers())
    return {fqns[f"{path}.{name}"]: tensor for name, tensor in pairs}


def _eager(model: nn.Module, path: str, fqns: Mapping[str, str], given: Given) -> nn.Module:
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


def _materialised(
    stage: nn.Module, interface: StageInterface, path: str, held: Mapping[str, Tensor], given: Given
) -> nn.Module:
    """The stage's block at `path`, holding the very tensors of the model's module."""
    block = stage.get_submodule(path)
    for inner, module in block.named_modules(prefix=path):
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, value in table.items():
                if value is not None:
                    fqn = interface.aliases.get(f"{inner}.{name}", f"{inner}.{name}")
                    table[name] = _tensor(Attr(fqn), held, given)
    return block
