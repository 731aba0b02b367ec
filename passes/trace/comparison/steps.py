"""One step of the model in plain PyTorch and one of its graph, on the same tensors.

Every draw has a stream of its own (`pdcompile.eager.randomness`), as the stages have them: eager
draws from one generator, and a branch that is not taken draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pdcompile.batch import FlatCall, output_leaves
from pdcompile.eager.autocast import autocast_region, region_dtype
from pdcompile.eager.randomness import DrawScope, reseed, seed_of
from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.ir.execution import Lookup, execute, materialise
from pdcompile.ir.graph import LeftOut, Op, OpGraph, Ref, leaves
from pdcompile.passes.preserved_state import same_buffers, write_buffers
from pdcompile.passes.trace.comparison.step_values import StepValues
from pdcompile.passes.trace.subject import device_of
from pdcompile.passes.trace.tape.observer import source_of_traceback
from pdcompile.plan import TiedParameter
from pdcompile.reference.tied_uses import TiedUses

Outputs: TypeAlias = dict[str, Any]
Loss: TypeAlias = Tensor | None


class ModelFails(VerifyError):
    """The model itself raises, without pdcompile."""


@dataclass(frozen=True)
class Step:
    """One step of one mode on one microbatch, of the model or of its graph.

    `size` counts samples; `seed` and `minibatch` name the random streams.  With
    `outputs_backward` backward starts at the outputs where there is no loss.  Outputs that the
    graph leaves out of training are not compared.  The gradients of each stage's uses of a `tied`
    parameter are summed apart.
    """

    model: nn.Module
    graph: OpGraph
    call: FlatCall
    size: int
    loss_fn: Callable[..., Any] | None
    autocast: str | None
    seed: int = 0
    minibatch: int = 0
    outputs_backward: bool = False
    tied: tuple[TiedParameter, ...] = ()

    def values(
        self, run: Callable[[], tuple[Outputs, Loss]], *, gradients: bool | None = None
    ) -> StepValues:
        """The values that `run` leaves behind; the model's buffers are restored.

        With `gradients` (None: as the graph's mode has it) autograd records the run.
        """
        model = self.model
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.zero_grad(set_to_none=True)
        with same_buffers(model):
            with torch.set_grad_enabled(self.graph.training if gradients is None else gradients):
                outputs, loss = run()
            found = StepValues(
                outputs={name: _copied(value) for name, value in outputs.items()},
                loss=_copied(loss),
                # Not copied: no other code refers to them, and the next step makes new ones.
                gradients={name: p.grad for name, p in model.named_parameters()},
                buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
                cast_to=region_dtype(self.autocast),
            )
            model.zero_grad(set_to_none=True)
        write_buffers(model, buffers)
        return found

    def eager(self) -> tuple[Outputs, Loss]:
        """Runs the model itself: outputs by value name and the loss, gradients left in ``.grad``.

        Raises VerifyError, with the user's line, when the model itself fails.
        """
        uses = TiedUses(self.model, self.tied if self.graph.training else ())
        with uses.of_minibatch():
            return self._eager(uses)

    def _eager(self, uses: TiedUses) -> tuple[Outputs, Loss]:
        args, kwargs, target = self.call.unflatten(self.call.copied_leaves())
        with DrawScope(self.model, self.seed, self.minibatch, 0) as scope:
            with autocast_region(self.autocast), _model_runs(), uses.forward():
                output = self.model(*args, **kwargs)
            outputs = self._named(output_leaves(output))
            loss = outputs.get(self.graph.loss or "")
            if (loss_fn := self.loss_fn) is not None:
                region = autocast_region(self.autocast)
                with scope.loss(), region, _model_runs(), uses.loss():
                    loss = loss_fn(output, target)
        try:
            self._backward(scope, outputs, loss)
        except RuntimeError as error:
            raise VerifyError(
                f"the model's own backward fails without pdcompile: {error}",
                where=f"{type(self.model).__module__}.{type(self.model).__qualname__}",
                remedy="run loss.backward() on the model itself and mend it first",
            ) from error
        return outputs, loss

    def captured(self, watch: Callable[[str, Any], None] | None = None) -> tuple[Outputs, Loss]:
        """Runs the graph on the model's tensors; `watch` is told each input and op by name."""
        model, graph = self.model, self.graph
        scope = DrawScope(model, self.seed, self.minibatch, 0)
        # Modules that are one op each draw inside as they do in eager.
        opaque = frozenset(op.module_path for op in graph.ops if op.opaque)
        lookup = StreamLookup(
            model, self.size, device_of(model, self.call), graph.tensor_values,
            scope=scope, opaque=opaque,
        )  # fmt: skip
        given = self.call.copied_leaves()
        inputs = {entry.name: given[entry.path] for entry in graph.inputs}
        if watch is not None:
            for name, tensor in inputs.items():
                watch(name, tensor)
        seed_next = seeding(graph, self.seed, self.minibatch)

        def ran(name: str, value: Any) -> None:
            if watch is not None:
                watch(name, value)
            seed_next()

        with autocast_region(self.autocast):
            env = execute(graph, inputs, lookup, watch=ran)
        loss = env[graph.loss] if graph.loss is not None else None
        outputs = self._named([materialise(leaf, env, lookup) for leaf in leaves(graph.output)])
        self._backward(scope, outputs, loss)
        return outputs, loss

    def _named(self, found: list[Any]) -> Outputs:
        """Leaves of the output by value name; those that no op makes by position."""
        places = enumerate(leaves(self.graph.output))
        return {
            place.name if isinstance(place, Ref) else f"output {i}": value
            for (i, place), value in zip(places, found, strict=True)
            if not isinstance(place, LeftOut)
        }

    def _backward(self, scope: DrawScope, outputs: Outputs, loss: Loss) -> None:
        roots: list[Any] = [loss]
        if loss is None and self.outputs_backward:
            roots = list(outputs.values())
        tensors = [root for root in roots if isinstance(root, Tensor) and root.requires_grad]
        if self.graph.training and tensors:
            backward = scope.backward_of if scope.draws else torch.autograd.backward
            backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@contextmanager
def _model_runs() -> Iterator[None]:
    """Raises failures of the user's code as ModelFails, with the user's line."""
    try:
        yield
    except PdcompileError:
        raise
    except Exception as error:
        raise ModelFails(
            f"the model itself fails on these inputs: {type(error).__name__}: {error}",
            where=source_of_traceback(error),
            remedy="run the model once without pdcompile",
        ) from error


@dataclass(frozen=True, kw_only=True)
class StreamLookup(Lookup):
    """Finds the model's modules; those that are opaque run inside a scope of draws."""

    scope: DrawScope
    opaque: frozenset[str]

    def module(self, path: str) -> Any:
        module = Lookup.module(self, path)
        return partial(_inside, self.scope, module) if path in self.opaque else module


def _inside(scope: DrawScope, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with scope:
        return module(*args, **kwargs)


def seeding(graph: OpGraph, seed: int, minibatch: int) -> Callable[[], None]:
    """Seeds the first op (of microbatch 0) at once, and each later one when it is called again."""
    reseed(seed_of(seed, minibatch, 0, "", -1))
    waiting: Iterator[Op] = iter(graph.ops)

    def seed_next() -> None:
        op = next(waiting, None)
        if op is not None and op.draw is not None and not op.opaque:
            reseed(seed_of(seed, minibatch, 0, op.module_path, op.draw))

    seed_next()
    return seed_next
