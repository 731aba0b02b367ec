"""Forward and backward of one microbatch on one stage: autograd, and no messages.

Each value from another stage that needs a gradient comes in by an `Entrance`.  Backward is one
call into autograd, with its roots in eager's order of summation: first what later stages have
already summed for what came in here (chained edges), then the gradients of what went out, then the
loss.  A stage that recomputes runs forward again for it (`SecondRun`).  Where
the schedule splits it, it stops where no earlier stage waits, and goes on later (`Rest`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pdcompile.batch.step_result import check_loss, scaled_loss
from pdcompile.eager.entrance import Entrance
from pdcompile.eager.gradients import memory_of
from pdcompile.eager.loss_scale import LossScale
from pdcompile.eager.randomness import DrawScope, end_draw
from pdcompile.eager.split_backward import Rest, Root, accumulate, first_part
from pdcompile.ir.stage_interface import named_results
from pdcompile.runtime.device.rank_device import RankDevice
from pdcompile.runtime.stage.absent import absent, is_absent
from pdcompile.runtime.stage.random_streams import Streams
from pdcompile.runtime.stage.second_run import Kept, SecondRun
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.stage.wiring import Wiring, expected
from pdcompile.runtime.transport.contract import check_tensor

Leaves = dict[str, Any]  # of the caller's, by path


@dataclass(slots=True)
class Feed:
    """One minibatch on one rank: what the caller gave, and what the last stage made of it.

    `leaves[i]` holds the paths that this rank needs of microbatch i, `outputs[i]` the model's
    outputs by value name, kept when `keep_outputs`; `losses` are weighted, in the order of the
    microbatches that ran here.
    """

    minibatch: int
    leaves: list[Leaves]
    sizes: list[int]
    weights: list[float]
    wiring: Wiring
    with_loss: bool = True
    keep_outputs: bool = False
    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class _Flight:
    """A microbatch between its forward and its backward."""

    entered: dict[int, Entrance] = field(default_factory=dict)  # by edge
    left: dict[int, GradientEdge | None] = field(default_factory=dict)  # edge: where it was made
    loss: Tensor | None = None
    draws: DrawScope | None = None  # of opaque modules, which may run again
    kept: Kept | None = None  # of a stage that recomputes: it has no graph until its backward
    rest: Rest | None = None  # between the two parts of its backward
    sent: set[int] = field(default_factory=set)  # by the first part: memory of gradients


class Precision(NamedTuple):
    """The region that model and loss run in, and the scale of the loss."""

    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    scale: LossScale | None = None


class Compute:
    """The compute of one stage."""

    def __init__(
        self,
        stage: int,
        weights: StageWeights,
        streams: Streams,
        precision: Precision,
        second: SecondRun | None = None,
        *,
        whole: bool = False,
        device: RankDevice | None = None,
    ) -> None:
        """`second`: of a stage that recomputes; `whole`: its backward cannot be split."""
        self._device = device or RankDevice()
        self._stage = stage
        self._weights = weights
        self._streams = streams
        self._region, self._scale = precision
        self._second = second
        self._whole = whole
        self.flights: dict[tuple[int, int], _Flight] = {}  # what waits for its backward

    def forward(
        self, feed: Feed, microbatch: int, version: int, receive: Callable[[int], Tensor]
    ) -> dict[str, Tensor]:
        """Run the stage on W_version; `receive(edge)` gives what came in.

        Returns its outputs by value name.  Raises ContractError when they are not as planned,
        ConfigError when the loss is not a scalar.
        """
        wiring, leaves = feed.wiring, feed.leaves[microbatch]
        module = self._weights.module(version, wiring.training)
        given = [
            self._placed(leaves[port.path or ""]) if edge is None else receive(edge)
            for port, edge in wiring.inputs
        ]
        kept = None
        if self._second is not None and wiring.training:
            kept = self._second.before(module, given, leaves)
        flight, values = self._run(feed, microbatch, module, given, leaves)
        if flight.loss is not None:
            feed.losses.append(flight.loss.detach())
        if wiring.training:
            self.flights[feed.minibatch, microbatch] = (
                flight if kept is None else _Flight(kept=kept)
            )
        return values

    def _run(
        self, feed: Feed, microbatch: int, module: nn.Module, given: list[Any], leaves: Leaves
    ) -> tuple[_Flight, dict[str, Tensor]]:
        """The stage's part of autograd's graph, and its results, for what was given to it."""
        wiring, flight = feed.wiring, _Flight()
        arguments = []
        for (port, edge), value in zip(wiring.inputs, given, strict=True):
            if edge in wiring.differentiable:
                entrance = flight.entered[edge] = Entrance(value)
                value = entrance.value
            arguments.append(value.clone() if port.mutated else value)
        self._streams.begin(feed.minibatch, microbatch)
        with torch.set_grad_enabled(wiring.training), self._region():
            results = module(*arguments)
            values = named_results(self._stage, [port for port, _ in wiring.outputs], results)
            if wiring.is_last and feed.with_loss:
                loss = self._loss(module, wiring, values, leaves)
                flight.loss = scaled_loss(loss, feed.weights[microbatch])
        end_draw()
        for port, edge in wiring.outputs:
            value = values[port.value]
            what = f"result {port.name!r} of stage {self._stage}"
            check_tensor(value, expected(port, feed.sizes[microbatch], feed.minibatch), what)
            if edge in wiring.differentiable:
                flight.left[edge] = get_gradient_edge(value) if value.requires_grad else None
        if wiring.training:
            flight.draws = self._streams.drawn(module)
        return flight, values

    def _again(self, feed: Feed, microbatch: int, version: int, kept: Kept) -> _Flight:
        """Run the stage a second time, for the graph that the first run did not keep."""
        assert self._second is not None
        module = self._weights.module(version, feed.wiring.training)
        with self._second.around(module, kept.buffers):
            flight, _ = self._run(feed, microbatch, module, kept.given, kept.leaves)
        return flight

    def _loss(
        self, module: Any, wiring: Wiring, values: dict[str, Tensor], leaves: Leaves
    ) -> Tensor:
        signature = wiring.signature
        if not signature.loss_inputs:
            assert signature.loss is not None
            return check_loss(values[signature.loss], "the model's output")
        arguments = [
            values[port.value] if port.value in values else self._placed(leaves[port.path or ""])
            for port in signature.loss_inputs
        ]
        return check_loss(module.loss(*arguments), "loss_fn")

    def _placed(self, leaf: Any) -> Any:
        return self._device.place(leaf) if isinstance(leaf, Tensor) else leaf

    def backward(
        self,
        feed: Feed,
        microbatch: int,
        version: int,
        receive: Callable[[int], Tensor],
        *,
        split: bool = False,
    ) -> list[tuple[int, Tensor]]:
        """Accumulate the stage's gradients; `receive(edge)` gives what later stages sent.

        Returns what goes to earlier stages as (edge, sum).  `split`: only what that needs, and the
        gradients of tied copies, with `backward_weight` to follow.
        """
        flight = self.flights.pop((feed.minibatch, microbatch))
        if flight.kept is not None:
            flight = self._again(feed, microbatch, version, flight.kept)
        self._weights.begin_backward(feed.minibatch, version)
        roots = self._roots(feed, flight, receive)
        rest = Rest()
        if split and not self._whole and flight.draws is None:
            passed_on = [self._weights.parameter(version, fqn) for fqn in self._weights.copies]
            rest = first_part(roots, [*passed_on, *(one.leaf for one in flight.entered.values())])
        elif roots and flight.draws is not None:
            flight.draws.backward_of([one for one, _ in roots], [one for _, one in roots])
        elif roots:
            accumulate(roots)
        sent = []
        for edge, entrance in flight.entered.items():
            gradient = entrance.take()
            sent.append((edge, absent(entrance.value) if gradient is None else gradient))
        memories = {memory_of(gradient) for _, gradient in sent}
        kept = map(memory_of, rest.gradients)
        self._weights.separate_gradients(version, memories.union(kept))
        if split:
            self.flights[feed.minibatch, microbatch] = _Flight(rest=rest, sent=memories)
        return sent

    def backward_weight(self, feed: Feed, microbatch: int, version: int) -> None:
        """Accumulate the gradients that a split `backward` left."""
        flight = self.flights.pop((feed.minibatch, microbatch))
        assert flight.rest is not None
        self._weights.begin_backward(feed.minibatch, version)
        flight.rest.run()
        self._weights.separate_gradients(version, flight.sent)

    def _roots(
        self,
        feed: Feed,
        flight: _Flight,
        receive: Callable[[int], Tensor],
    ) -> list[Root]:
        """Where backward begins, in eager's order of summation: where a gradient has come in."""
        came: list[tuple[Tensor | GradientEdge | None, Tensor]] = [
            (entrance.value, receive(edge))
            for edge, entrance in flight.entered.items()
            if edge in feed.wiring.chained
        ]
        for edge, origin in flight.left.items():
            came.append((origin, receive(edge)))
        roots: list[Root] = [
            (origin, gradient)
            for origin, gradient in came
            if origin is not None and not (self._device.on_host(gradient) and is_absent(gradient))
        ]
        if flight.loss is not None and flight.loss.requires_grad:
            scale = None if self._scale is None else self._scale.scale(feed.minibatch)
            seed = None if scale is None else torch.full_like(flight.loss, scale)
            roots.append((flight.loss, seed))
        return roots
