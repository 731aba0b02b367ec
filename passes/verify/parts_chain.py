"""Chains of the parts of all stages, which take turns in one process, beside the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch.call import copied
from pdcompile.eager.gradients import gradient_hooks
from pdcompile.eager.module_copies import twin_with
from pdcompile.errors import VerifyError
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.stage_interface import Sources
from pdcompile.parts.shard import Division, Shard
from pdcompile.parts.turns import UnequalParts, in_turns
from pdcompile.passes.stages.chain import Chain
from pdcompile.passes.trace.comparison.step_values import same
from pdcompile.plan import Edge, TiedParameter


class PartsChain:
    """Chains of one mode, one for each part, with its own slices of the model's tensors.

    It stands in the place of a `Chain` of the whole model: what the parts compute becomes outputs,
    gradients and buffers of that.
    """

    def __init__(
        self, division: Division, graph: OpGraph, edges: tuple[Edge, ...],
        tied: tuple[TiedParameter, ...], sources: Sources, model: nn.Module, seed: int,
    ) -> None:  # fmt: skip
        self.graph, self.edited = graph, sources.edited
        self._division, self._model = division, model
        self._models = [
            twin_with(model, lambda fqn, one, p=p: division.own(fqn, one, p).clone())  # type: ignore[misc]
            for p in range(division.parts)
        ]
        for _, (parameter, *own) in self._of_all("named_parameters"):
            for hook in gradient_hooks(parameter):  # of one that is whole
                for one in own:
                    hook.follow(one, parameter)
        self._chains = [
            Chain(graph, edges, tied, _own_constants(sources, division, p), own, seed)
            for p, own in enumerate(self._models)
        ]

    @property
    def running(self) -> int:
        """The stage at work."""
        return min(chain.running for chain in self._chains)

    def forward(
        self, leaves: Mapping[str, Any], minibatch: int
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Outputs of the model by value name, and the loss if there is one.

        Raises:
            VerifyError: parts do not come to the same conversions, or to the same whole values.
        """
        with torch.no_grad():  # what the model has now
            for fqn, (tensor, *own) in self._of_all("named_parameters", "named_buffers"):
                for part, one in enumerate(own):
                    one.data, one.grad = self._division.own(fqn, tensor.data, part).clone(), None
        found = self._in_turns([
            partial(chain.forward, copied(leaves), minibatch) for chain in self._chains
        ])  # fmt: skip
        loss, outputs = found[0][1], self._division.outputs if self.graph.training else {}
        if loss is not None:
            _joined("the loss", [other for _, other in found], None)
        with torch.no_grad():
            for fqn, (buffer, *own) in self._of_all("named_buffers"):
                if buffer.numel():
                    buffer.copy_(_joined(fqn, own, self._division.shards.get(fqn)))
        return {
            n: _joined(n, [one[n] for one, _ in found], outputs.get(n)) for n in found[0][0]
        }, loss

    def backward(self) -> None:
        """Gradients of every parameter of the model, from those of the parts.  Raises as
        `forward`."""
        self._in_turns([chain.backward for chain in self._chains])
        for fqn, (parameter, *own) in self._of_all("named_parameters"):
            given = [one.grad for one in own if one.grad is not None]
            if given and len(given) < len(own):
                raise _apart(f"the gradient of {fqn}, which some have and others have not")
            if given and fqn in self._division.summed:
                parameter.grad = torch.stack(given).sum(0)
            else:
                shard = self._division.shards.get(fqn)
                parameter.grad = _joined(fqn, given, shard) if given else None

    def _of_all(self, *methods: str) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Tensors of the model, by name, each with what the parts have of it."""
        for method in methods:
            own = [dict(getattr(one, method)()) for one in self._models]
            for fqn, tensor in getattr(self._model, method)():
                yield fqn, (tensor, *(one[fqn] for one in own))

    def _in_turns(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        try:
            return in_turns(functions)
        except UnequalParts as error:
            raise VerifyError(
                str(error), where=f"stage_{self.running}.py",
                remedy="undo the last edit of the stage's file" if self.edited
                else "please report this model; parts=1 runs it all the same",
            ) from error  # fmt: skip


def _joined(name: str, given: Sequence[Any], shard: Shard | None) -> Any:
    """The whole of a value from what the parts have of it.

    Raises:
        VerifyError: it is to be the same on all of them, and is not.
    """
    if shard is not None:
        return shard.joined(given)
    if isinstance(given[0], Tensor) and not all(same(given[0], one) for one in given):
        raise _apart(name)
    return given[0]


def _own_constants(sources: Sources, division: Division, part: int) -> Sources:
    own = {fqn: division.own(fqn, one, part) for fqn, one in sources.constants.items()}
    return replace(sources, constants=own)


def _apart(what: str) -> VerifyError:
    return VerifyError(
        f"parts of a stage have unlike values of {what}, which is to be the same on all of them",
        remedy="undo the last edit of a stage's file; else please report this model",
    )
