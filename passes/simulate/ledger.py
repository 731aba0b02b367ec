"""The memory ledger of every rank, by walking its programs in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdcompile.passes.layout import (
    FAMILIES,
    GRADIENT,
    GRADIENT_SLOTS,
    TIED,
    VALUE,
    Hop,
    Layout,
    hops,
    layout_of,
)
from pdcompile.plan import MemoryLedger, Plan
from pdcompile.schedule import Action, Instruction, Schedule

_FAMILY_OF = {action: family for family in FAMILIES for action in (family.send, family.wait_send)}


def ledgers(plan: Plan, programs: Sequence[Schedule]) -> tuple[MemoryLedger, ...]:
    """One ledger a rank, for these successive programs.

    Weights: trainable ones times live versions, others once.  Gradients: buffers that live at
    once, from a minibatch's first backward to its update.  Optimizer: the factor times what this
    stage updates itself (not the copies of a tied parameter that another stage owns).
    Activations: saved bytes times the most microbatches between forward and backward; a stage
    that recomputes holds one saved set, and of the others their inputs, which are receive slots.
    Receive slots: all of every pool, allocated once.  Send buffers: the most bytes between send
    and its wait.  The sum of the lines is an upper bound of the peak: their peaks need not
    coincide.
    """
    layout = layout_of(plan)
    stage_of = {rank: s for s, ranks in enumerate(layout.ranks) for rank in ranks}
    found = []
    for rank in range(layout.num_columns):
        if rank not in stage_of:
            found.append(MemoryLedger())
            continue
        column = [
            (one, base) for base, program in _bases(layout, programs)
            for one in program.columns[rank]
        ]  # fmt: skip
        found.append(_ledger(plan, layout, stage_of[rank], column))
    return tuple(found)


def _bases(layout: Layout, programs: Sequence[Schedule]) -> Iterable[tuple[int, Schedule]]:
    base = 0
    for program in programs:
        yield base, program
        base += program.name == layout.name


def _ledger(
    plan: Plan, layout: Layout, index: int, column: Sequence[tuple[Instruction, int]]
) -> MemoryLedger:
    stage = plan.stages[index]
    copies = sum(one.bytes for one in plan.tied if index in one.stages[1:])
    in_flight, sent, gradients = 0, 0, set[int]()
    most_in_flight, most_sent, in_buffers = 0, 0, 0
    for one, base in column:
        action = one.action
        if action is Action.FORWARD:
            in_flight += 1
            most_in_flight = max(most_in_flight, in_flight)
        elif action is Action.BACKWARD:
            in_flight -= 1
            gradients.add(base + one.minibatch)
            in_buffers = max(in_buffers, len(gradients))
        elif action is Action.STEP:
            gradients.discard(base + one.minibatch)
        elif (family := _FAMILY_OF.get(action)) is not None:
            size = _bytes(plan, family, one.edge)
            sent += size if action is family.send else -size
            most_sent = max(most_sent, sent)
    mine = hops(layout, index)
    slots: list[tuple[Hop, int]] = [(hop, layout.pool(index)) for hop in mine.before_forward]
    slots += [(hop, GRADIENT_SLOTS) for hop in mine.before_backward]
    return MemoryLedger(
        weights_bytes=stage.parameter_bytes + (layout.versions - 1) * stage.trainable_bytes,
        gradients_bytes=in_buffers * stage.trainable_bytes,
        optimizer_bytes=int(
            plan.training.optimizer_factor * max(0, stage.trainable_bytes - copies)
        ),
        activations_bytes=(1 if stage.recompute else most_in_flight) * stage.saved_bytes,
        receive_bytes=sum(count * _bytes(plan, hop.family, hop.edge) for hop, count in slots),
        send_bytes=most_sent,
        workspace_bytes=stage.workspace_bytes,
    )


def _bytes(plan: Plan, family: tuple[Action, ...], edge: int) -> int:
    """What a buffer of this transfer takes; new weights are sent from where they live."""
    if family is VALUE or family is GRADIENT:
        return plan.edges[edge].bytes
    return plan.tied[edge].bytes if family is TIED else 0
