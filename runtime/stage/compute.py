"""Forward and backward of one microbatch on one stage, on the weights of a version; no messages.

`StageRun` runs the stage.  Here are the minibatches that it runs for (`Feed`), what waits between
forward and backward, and what a stage that recomputes keeps instead (`Kept`).

The first run of a stage that recomputes is that of one which keeps its activations, with autograd
on, because kernels are chosen by it and would round otherwise without; then its graph is dropped.
Kept are the inputs as they came (what a stage writes in place it clones), and every buffer that
forward writes as it was before.  The second run works on these copies, which are forgotten after
it, so that the model's own buffers are written once.  Forward hooks of opaque modules run in the
first run alone: those that do more than look were refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch.step_result import check_loss, scaled_loss
from pdcompile.compiled import Compiled
from pdcompile.eager.autocast import autocast_region
from pdcompile.eager.loss_scale import LossScale
from pdcompile.eager.split_backward import Rest
from pdcompile.ir.graph import size_at
from pdcompile.ir.stage_interface import Port
from pdcompile.ir.stage_run import Flight, Microbatch, StageRun
from pdcompile.ir.stage_streams import Streams
from pdcompile.ir.stage_wiring import Wiring
from pdcompile.runtime.device import RankDevice
from pdcompile.runtime.stage.gradients import absent, is_absent, shared_memory
from pdcompile.runtime.stage.host_memory import brought
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.transport.contract import Expected, check_result
from pdcompile.warn import warn
from pdcompile.weights.source import Registered, registered, replaced

Leaves = dict[str, Any]  # of the caller's, by path
_AS_IT_IS = nullcontext()


@dataclass(frozen=True, slots=True)
class Kept:
    """One microbatch of a recomputing stage between its forward and its backward.

    `given` are the stage's inputs in order, `leaves` what its loss reads of the caller's; `buffers`
    are those that forward writes, each with a copy.
    """

    given: list[Any]
    leaves: Leaves
    buffers: list[tuple[Registered, Tensor]]


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
    #: microbatches between forward and backward (`Kept`: of a stage that recomputes, which has no
    #: graph until its backward), or between the two parts of that, with memory of `shared_memory`
    flights: dict[int, Flight | Kept | tuple[Rest, Collection[int]]] = field(default_factory=dict)


class Compute:
    """The compute of one stage: `StageRun` on the weights of a version, and what is in flight."""

    def __init__(
        self, stage: int, compiled: Compiled, weights: StageWeights, streams: Streams,
        device: RankDevice, scale: LossScale | None,
    ) -> None:  # fmt: skip
        self._stage, self._weights, self._device, self._scale = stage, weights, device, scale
        self._autocast = compiled.plan.training.autocast
        self._makes = compiled.makes_tensors(stage)  # of nothing
        region = self._region if self._autocast is not None or self._makes else None
        self._stage_run, self._backend = StageRun(stage, streams, region), streams.backend
        self._whole = bool(compiled.interfaces[stage].opaque)  # its backward cannot be split
        self._recomputes = bool(compiled.plan.stages[stage].recompute)
        self._fetched = compiled.stream.spec.fetched  # weights rest on the host
        self._written = compiled.written_buffers(stage)
        self._written_inputs = frozenset(compiled.capture.train.written_inputs())
        self.wiring: Wiring | None = None  # of the last minibatch that began
        self._results: dict[str, Callable[[int], Expected]] = {}  # of it, by the name of the value

    def wire(self, wiring: Wiring) -> None:
        """Minibatches of another wiring begin."""
        self.wiring = wiring
        self._results = {port.value: cache(partial(expected, port)) for port, _ in wiring.outputs}

    @contextmanager
    def _region(self) -> Iterator[None]:
        """Context of model and loss."""
        making = self._device.making() if self._makes else nullcontext()
        with autocast_region(self._autocast), making:
            yield

    def compile_ahead(self, wiring: Wiring, size: int) -> None:
        """Compile the stage before the first minibatch, unless modules in it run as they are, for
        microbatches of `size` zeros; warns where these cannot be computed.

        A rank compiles its stages while the others compile theirs; in the first step each would
        wait for the input that stages before it make once they are compiled.  Neither a loss_fn nor
        an opaque module is run, which may do more than compute.
        """
        if self._whole or self._fetched:
            return
        module = self._weights.module(0, wiring.training)
        given = [self._zeros(port, size) for port, _ in wiring.inputs]
        try:
            with _apart(module):
                call = Microbatch(0, 0, dict[str, Any]().__getitem__, loss=None)
                _, values = self._stage_run.forward(module, wiring, given, call)
                roots = [one for one in values.values() if one.requires_grad]
                torch.autograd.backward(roots, [torch.zeros_like(one) for one in roots])
        except Exception as error:  # its first microbatch says it again
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            when = "at its first microbatch: on zeros it raises"
            warn(f"stage {self._stage} is compiled {when} {said}")

    def _zeros(self, port: Port, size: int) -> Tensor:
        """A value like those of a port, laid out as they come."""
        shape, dtype, _ = expected(port, size)
        last = port.image and self._backend == "inductor"
        order = (0, 2, 3, 1) if last else port.stride_order or tuple(range(len(shape)))
        return torch.empty_permuted(shape, order, dtype=dtype, device=self._device.device).zero_()

    def forward(
        self, feed: Feed, microbatch: int, version: int, came: Mapping[int, Tensor]
    ) -> dict[str, Tensor]:
        """Run the stage on W_version and what came in, by edge.

        Returns its outputs by value name.  Raises ContractError when they are not as planned,
        ConfigError when the loss is not a scalar.
        """
        wiring, leaves = feed.wiring, feed.leaves[microbatch]
        module = self._weights.module(version, wiring.training)
        given = [
            self._placed(leaves[port.path or ""]) if edge is None else came[edge]
            for port, edge in wiring.inputs
        ]
        kept = self._kept(module, given, leaves) if self._recomputes and wiring.training else None
        with self._brought(module):
            flight, values = self._run(feed, microbatch, module, given, leaves)
        if flight.loss is not None:
            feed.losses.append(flight.loss.detach())
        if wiring.training:
            feed.flights[microbatch] = kept or flight
        return values

    def _brought(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context in which a stage runs: it has its weights on the device."""
        return brought(module, self._device) if self._fetched else _AS_IT_IS

    def _kept(self, module: nn.Module, given: list[Any], leaves: Leaves) -> Kept:
        """Copies of what the forward to come reads and writes."""
        held = self._weights.registered_buffers(module, self._written)
        copies = {id(one.tensor): one.tensor.clone() for one in held}  # one has several names
        # `given` is cloned where forward writes it; what the loss reads is not.
        leaves = {p: x.clone() if p in self._written_inputs else x for p, x in leaves.items()}
        return Kept(given, leaves, [(one, copies[id(one.tensor)]) for one in held])

    def _run(
        self, feed: Feed, microbatch: int, module: nn.Module, given: list[Any], leaves: Leaves
    ) -> tuple[Flight, dict[str, Tensor]]:
        """The stage's part of autograd's graph, and its results, for what was given to it."""
        wiring, size = feed.wiring, feed.sizes[microbatch]
        where = "loss_fn" if wiring.signature.loss_inputs else "the model's output"

        def loss(found: Tensor) -> Tensor:
            return scaled_loss(check_loss(found, where), feed.weights[microbatch])

        def check(port: Port, value: Any) -> None:
            check_result(value, self._results[port.value](size), port.name, self._stage)

        call = Microbatch(
            feed.minibatch, microbatch, lambda path: self._placed(leaves[path]),
            loss if feed.with_loss else None, check,
        )  # fmt: skip
        return self._stage_run.forward(module, wiring, given, call)

    def _placed(self, leaf: Any) -> Any:
        return self._device.place(leaf) if isinstance(leaf, Tensor) else leaf

    def backward(
        self, feed: Feed, microbatch: int, version: int, came: Mapping[int, Tensor],
        *, split: bool = False,
    ) -> list[tuple[int, Tensor]]:  # fmt: skip
        """Accumulate the stage's gradients from what later stages sent, by edge.

        Returns what goes to earlier stages as (edge, sum).  `split`: only what that needs, and the
        gradients of tied copies, with `backward_weight` to follow.
        """
        self._weights.begin_backward(feed.minibatch, version)
        gradients = {edge: None if is_absent(one) else one for edge, one in came.items()}
        passed_on = None
        if split and not self._whole:
            passed_on = [self._weights.parameter(version, fqn) for fqn in self._weights.copies]
        module = self._weights.module(version, feed.wiring.training)
        with self._brought(module):
            flight = feed.flights.pop(microbatch)
            assert not isinstance(flight, tuple)
            if isinstance(flight, Kept):  # for the graph that the first run did not keep
                with replaced(flight.buffers):
                    flight = self._run(feed, microbatch, module, flight.given, flight.leaves)[0]
            of_loss = None  # the gradient that backward begins with there: 1
            if self._scale is not None and flight.loss is not None:
                of_loss = torch.full_like(flight.loss, self._scale.scale(feed.minibatch))
            self._stage_run.backward(
                flight, feed.wiring, gradients.__getitem__, of_loss=of_loss, first=passed_on
            )
        sent = []
        for edge, entrance in flight.entered.items():
            value, found = entrance.value, entrance.take()
            sent.append((edge, absent(value) if found is None else found))
        shared: Collection[int] = ()
        if self._weights.without:  # else all are added to where they are
            shared = shared_memory([gradient for _, gradient in sent] + [*flight.rest.gradients])
            self._weights.separate_gradients(version, shared)
        if split:
            feed.flights[microbatch] = flight.rest, shared
        return sent

    def backward_weight(self, feed: Feed, microbatch: int, version: int) -> None:
        """Accumulate the gradients that a split `backward` left."""
        found = feed.flights.pop(microbatch)
        assert isinstance(found, tuple)
        rest, shared = found
        self._weights.begin_backward(feed.minibatch, version)
        rest.run()
        self._weights.separate_gradients(version, shared)


def expected(port: Port, size: int, minibatch: int = 0) -> Expected:
    """Tensor that a port carries for a microbatch of `size` samples."""
    shape = tuple([size_at(one, size) for one in port.shape])
    return Expected(shape, getattr(torch, port.dtype), minibatch)


def _apart(module: nn.Module) -> AbstractContextManager[None]:
    """Context in which a stage has Parameters of its own, on the same memory, and copies of its
    buffers: no gradient, no write and no hook of the user's comes of it."""
    held, own = [*registered(module)], dict[int, Tensor]()  # by id: one may have several names
    for one in held:
        if id(one.tensor) not in own:
            data, trained = one.tensor.detach(), one.tensor.requires_grad
            made = data.clone() if one.is_buffer else nn.Parameter(data, trained)
            own[id(one.tensor)] = made.requires_grad_(trained)
    return replaced((one, own[id(one.tensor)]) for one in held)
