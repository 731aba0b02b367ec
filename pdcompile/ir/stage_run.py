"""StageRun: forward and backward of one microbatch on one stage, by autograd alone.

Whoever runs a stage brings the values that come in and takes those that go out: the runtime by
messages, verification and timing from a dict.  Each value from another stage that needs a gradient
comes in by an `Entrance`.  Backward is one call into autograd, with its roots in eager's order of
summation: first what later stages have already summed for what came in here (chained edges), then
the gradients of what went out, then the loss.  Where the schedule splits it, it stops where no
earlier stage waits, and goes on later (`Rest`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pdcompile.eager.randomness import DrawScope, end_draw
from pdcompile.eager.split_backward import Entrance, Rest, first_part
from pdcompile.ir.stage_interface import Port, named_results
from pdcompile.ir.stage_streams import Streams
from pdcompile.ir.stage_wiring import Wiring
from pdcompile.parts.conversions import resharding
from pdcompile.releases.torch_internals import Root, run_backward

Gradient = Callable[[int], Tensor | None]  # of an edge, from later stages


@dataclass(slots=True)  # a frozen one takes twice as long to make
class Microbatch:
    """One call of a stage's forward: its random streams are named by minibatch and microbatch.

    `leaf` gives a leaf of the call by its path, for the loss; `loss` checks and scales the loss,
    None where it is not wanted; `check` raises for a result that is not as planned.
    """

    minibatch: int
    microbatch: int
    leaf: Callable[[str], Any]
    loss: Callable[[Tensor], Tensor] | None = lambda loss: loss
    check: Callable[[Port, Any], None] = lambda port, value: None


@dataclass(slots=True)
class Flight:
    """A microbatch between its forward and its backward."""

    entered: dict[int, Entrance] = field(default_factory=dict)  # by edge
    left: dict[int, GradientEdge | None] = field(default_factory=dict)  # edge: where it was made
    loss: Tensor | None = None
    draws: DrawScope | None = None  # of opaque modules, which may run again
    rest: Rest = field(default_factory=Rest)  # between the two parts of its backward

    def roots(self, wiring: Wiring, gradient: Gradient, of_loss: Tensor | None) -> list[Root]:
        """The places where backward begins and has a gradient, in eager's order of summation."""
        chained = [
            (edge, one.value) for edge, one in self.entered.items() if edge in wiring.chained
        ]
        roots: list[Root] = [
            (origin, came)
            for edge, origin in (*chained, *self.left.items())
            if origin is not None and (came := gradient(edge)) is not None
        ]
        if self.loss is not None and self.loss.requires_grad:
            roots.append((self.loss, of_loss))
        return roots


class StageRun:
    """Runs one stage.

    `region` is opened around model and loss; `streams` is where random ops draw, of modules that
    are attached to it.
    """

    def __init__(
        self, stage: int, streams: Streams,
        region: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:  # fmt: skip
        self._stage, self._streams, self._region = stage, streams, region
        self._idle: defaultdict[Any, list[Entrance]] = defaultdict(list)  # by edge and shape

    def forward(
        self, module: nn.Module, wiring: Wiring, given: Sequence[Any], call: Microbatch
    ) -> tuple[Flight, dict[str, Tensor]]:
        """Runs the stage on its arguments, in order: what backward needs, and the results by value
        name.

        Raises:
            SourceError: forward returns more or fewer results than planned.
        """
        flight, arguments = Flight(), []
        for (port, edge), value in zip(wiring.inputs, given, strict=True):
            if edge in wiring.differentiable:
                entrance = Entrance.of(value, self._idle[edge, value.shape])
                flight.entered[edge], value = entrance, entrance.value
            arguments.append(value.clone() if port.mutated else value)
        self._streams.begin(call.minibatch, call.microbatch)
        same = torch.is_grad_enabled() == wiring.training
        mode = nullcontext() if same else torch.set_grad_enabled(wiring.training)
        again = wiring.training and wiring.signature.unshards
        with self._around(mode, again) if again or self._region is not None else mode:
            results = module(*arguments)
            values = named_results(self._stage, wiring.signature.outputs, results)
            if call.loss is not None and wiring.signature.loss is not None:
                flight.loss = call.loss(_loss(module, wiring, values, call.leaf))
        end_draw()
        for port, edge in wiring.outputs:
            value = values[port.value]
            call.check(port, value)
            if edge in wiring.differentiable:
                flight.left[edge] = get_gradient_edge(value) if value.requires_grad else None
        if wiring.training:
            flight.draws = self._streams.drawn(module)
        return flight, values

    @contextmanager
    def _around(self, mode: AbstractContextManager[Any], again: bool) -> Iterator[None]:
        """Context of model and loss; `again`: weights are gathered again in backward."""
        region = nullcontext() if self._region is None else self._region()
        whole = resharding(self._streams.apart) if again else nullcontext()
        with mode, region, whole:
            yield

    def backward(
        self,
        flight: Flight,
        wiring: Wiring,
        gradient: Gradient,
        *,
        of_loss: Tensor | None = None,
        first: Iterable[Tensor] | None = None,
    ) -> None:
        """Accumulates the gradients of parameters and of what came in (`Flight.entered`).

        Args:
            gradient: what later stages sent along an edge, None where there was none.
            of_loss: the gradient of the loss; None: 1.
            first: parameters whose gradients are needed first: what only others need is left for
                `Flight.rest`; None: all at once.
        """
        roots = flight.roots(wiring, gradient, of_loss)
        if first is not None and flight.draws is None:
            leaves = [one.leaf for one in flight.entered.values()]
            flight.rest = first_part(roots, [*first, *leaves])
        elif roots:
            run = run_backward if flight.draws is None else flight.draws.backward
            run(roots)


def _loss(
    module: Any, wiring: Wiring, values: dict[str, Tensor], leaf: Callable[[str], Any]
) -> Tensor:
    """The loss that the model returns, or that of the loss function."""
    signature = wiring.signature
    if not signature.loss_inputs:
        return values[signature.loss or ""]
    arguments = [
        values[port.value] if port.value in values else leaf(port.path or "")
        for port in signature.loss_inputs
    ]
    found: Tensor = module.loss(*arguments)
    return found
