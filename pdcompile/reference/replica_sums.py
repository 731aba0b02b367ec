"""Sums of replicas, in the order in which a plan's ranks make them.

Each replica of a stage adds up the gradients of its own microbatches; then these sums are added, in
the order of replicas.  Of tied parameters `TiedUses` knows more, which are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from pdcompile.batch.step_result import total_loss
from pdcompile.eager.gradients import added
from pdcompile.plan import Plan


class ReplicaSums:
    """Accumulates the gradients of each replica apart from those of others."""

    def __init__(self, model: nn.Module, plan: Plan | None) -> None:
        """Keep nothing apart without a plan, and where every minibatch is one microbatch."""
        self._stages: list[tuple[nn.Parameter, int]] = []
        self._parts: list[dict[int, Tensor | None]] = []  # by rank, of each of these
        if plan is None or plan.training.kind.updates_each:
            return
        self._spec, self._last = plan.spec, len(plan.stages) - 1
        named = dict(model.named_parameters())
        own = {fqn: s.index for s in plan.stages for fqn in s.parameters if s.replicas > 1}
        for fqn in own.keys() - {one.fqn for one in plan.tied}:
            if fqn in named and named[fqn].requires_grad:
                self._stages.append((named[fqn], own[fqn]))

    @contextmanager
    def of_minibatch(self) -> Iterator[None]:
        """Context of backwards, after which the sums are in ``.grad``."""
        earlier = [parameter.grad for parameter, _ in self._stages]
        self._parts = [{} for _ in self._stages]
        yield
        for (one, stage), parts, before in zip(self._stages, self._parts, earlier, strict=True):
            total: Tensor | None = None
            for rank in self._spec.ranks[stage]:
                if (part := parts.get(rank)) is not None:
                    total = added(total, part)
            one.grad = before if total is None else added(before, total)

    def total(self, losses: list[Tensor]) -> Tensor:
        """The loss of a minibatch: each rank sums those of its microbatches."""
        parts: dict[int, list[Tensor]] = {}
        for index, loss in enumerate(losses):
            rank = self._spec.rank(self._last, index) if self._stages else 0
            parts.setdefault(rank, []).append(loss)
        return total_loss([total_loss(own) for _, own in sorted(parts.items())])

    @contextmanager
    def of_microbatch(self, index: int) -> Iterator[None]:
        """Context of the backward of a microbatch: ``.grad`` is that of its replica."""
        held = [(one, self._spec.rank(stage, index)) for one, stage in self._stages]
        for (one, rank), parts in zip(held, self._parts, strict=True):
            one.grad = parts.get(rank)
        yield
        for (one, rank), parts in zip(held, self._parts, strict=True):
            parts[rank] = one.grad
