"""The chain of stages that is likely the fastest: none is slow, and no round trip takes long.

A stage s with d_s microbatches in flight waits for the first of them to come back.  Stage t > s has
d_t in flight, so d_s − d_t + 1 of them pass during one trip from s to t and back, which takes the
work of stages s … t and the messages between them.  Over slow links this decides, and not the
busiest stage: with λ seconds a microbatch, busy seconds w and messages h,

    E_s = w_s − λ + max(0, h_s + E_{s+1} + λ (1 − d_s + d_{s+1})) ≤ 0

says that no trip from s on takes too long (as in the largest sum of numbers in a row).  Less of E
is never worse, so a dynamic program over ideals finds the chain with the least E, and bisection the
least λ for which there is one.  It is no bound: how a minibatch begins and ends is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.chains import Chains, Key, Piece, groups_of, straight_chains
from pdcompile.passes.partition.segments import ALL, Coefficients, Matrix, Segments
from pdcompile.plan.evaluate import Deployment
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.registry import ScheduleKind, kind_of

CLOSE = 1e-3  # relative, of seconds: where bisection ends
WIDER, MOST = 1.3, 1e4  # seconds grow by that factor until there is a chain; to how many times


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of a stage J∖I in a chain, as [I, J].

    `step`: of the objective, at least; `busy`: of a microbatch; `messages`: of those over the cut
    behind it and back, by J alone.  `fewer`: microbatches in flight here and not in the next stage;
    `waits`: False where all of them are in flight at once; `due`: its part of λ.
    """

    step: Matrix
    busy: Matrix
    messages: Matrix
    fewer: int
    waits: bool = True
    due: float = 1.0


@dataclass(frozen=True)
class Trips:
    """Turns of one schedule's stages; `m`: microbatches of a minibatch, `speed`: of the fastest
    device."""

    segments: Segments
    kind: ScheduleKind
    flush: bool
    m: int
    speed: float

    def turn(self, on: Coefficients, warmup: int, fewer: int) -> Turn:
        """That of a stage with these coefficients, and so many forwards before its first backward
        beyond one."""
        segments, r = self.segments, on.option.replicas
        busy, load = segments.compute(on), segments.load(on)
        forth, back = segments.crossing(on.out)
        if not self.flush:
            return Turn(load, busy / r, (forth + back) / r, fewer)
        # Of what is in flight at the beginning and at the end only the longer half counts.
        own, forward = self.m / r - 1, segments.forward / on.speed
        busy = own * busy - warmup * np.minimum(forward, busy - forward)
        steady, each = max(own - warmup, 0.0), max(self.m - 1, 1)
        before = segments.forward[0]
        if not self.kind.splits_backward:
            before = before + segments.backward[0]
        step = before[:, None] / self.speed + self.m * load
        messages = steady * (forth + back) / each
        return Turn(step, np.maximum(busy, 0.0) / each, messages, fewer, waits=steady > 0)

    def per_microbatch(self, seconds: float) -> float:
        """λ where the objective takes so many seconds: beside one microbatch on its own."""
        if not self.flush:
            return seconds
        first = self.kind.halves(1.0)[0]
        alone = self.segments.forward[0, -1] + first * self.segments.backward[0, -1]
        return float(seconds - alone / self.speed) / max(self.m - 1, 1)


def likely_chain(
    chains: Chains,
    turn_of: Callable[[Key, StageDeployment], Turn],
    per_microbatch: Callable[[float], float],
) -> tuple[Piece, ...] | None:
    """The chain with the least seconds of the objective; None where none keeps the limits.

    Args:
        chains: what is infinite by their costs is no stage.
        turn_of: by stages and ranks left, and the row of the menu.
        per_microbatch: λ for seconds of the objective.

    Raises:
        OutOfTimeError: the budget of the chains ended first.
    """
    allowed, turn_of, each = chains.costs, cache(turn_of), 0.0

    @cache
    def costs(left: int, u: int, option: StageDeployment) -> tuple[Matrix, Matrix]:
        turn, free = turn_of((left, u), option), allowed(left, u, option, ALL)[0] < np.inf
        return np.where(free, turn.step, np.inf), np.where(free, turn.busy, np.inf)

    def joined(key: Key, option: StageDeployment, busy: Matrix, behind: Matrix) -> Matrix:
        turn = turn_of(key, option)
        due = each * turn.due
        found = busy - due
        if turn.waits:
            found += np.maximum(0.0, turn.messages + behind + due * (1 - turn.fewer))
        return np.where(found <= np.where(behind < np.inf, 0.0, -np.inf), found, np.inf)

    def within(seconds: float) -> tuple[Piece, ...] | None:
        nonlocal each
        each = per_microbatch(seconds)
        trips.solve(seconds)
        return trips.best() if trips.met else None

    trips = replace(chains, costs=lambda *key: costs(*key[:3]), joined=joined)
    least = most = trips.solve()
    if least == np.inf:
        return None
    while (found := within(most)) is None:
        least, most = most, most * WIDER
        if most > MOST * least:
            return None
    while most > least * (1 + CLOSE):
        middle = math.sqrt(least * most)
        if (shorter := within(middle)) is None:
            least = middle
        else:
            most, found = middle, shorter
    return found


def likely_groups(
    segments: Segments,
    on: Deployment,
    shares: Sequence[float] = (),
    *,
    budget: Budget | None = None,
    loads: Sequence[Matrix] = (),
) -> tuple[int, ...] | None:
    """The stage of each group in the likely chain of stages on such ranks.

    Ranks that hold several stages run them in turn: one microbatch passes during a trip, whatever
    is in flight.

    Args:
        shares: of all work, of each stage; empty: as a minibatch's begin and end suggest.
        loads: of each stage, infinite for what it may not be; empty: by memory.

    Raises:
        OutOfTimeError: the budget ended first.
    """
    count, m = len(on.ranks), on.num_microbatches
    every, in_turn = Coefficients.of(on), len({*on.ranks}) < count
    depths = warmup_of(() if in_turn else on.in_flight, count, m)
    trips = Trips(segments, kind_of(on.schedule), on.flush, m, max(on.speeds))

    def turn_of(key: Key, _: StageDeployment) -> Turn:
        s = count - key[1]
        stage, fewer = every[s], depths[s] - depths[s + 1] if s + 1 < count else 1
        turn = trips.turn(stage, depths[s], fewer)
        if not shares:
            return turn
        busy, due = segments.compute(stage) / stage.option.replicas, max(shares[s], 1e-9)
        load = loads[s] if loads else segments.load(stage)
        return replace(turn, step=load / due, busy=busy, due=due)

    def fitting(stage: int) -> Matrix:
        return np.where(segments.fits(every[stage]), np.zeros((1, 1)), np.inf)

    chains = straight_chains(segments, fitting, count, budget, keep=True)
    found = likely_chain(chains, turn_of, float if shares else trips.per_microbatch)
    return None if found is None else groups_of(segments, found)
