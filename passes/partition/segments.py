"""Costs of every stage that two ideals I ⊂ J can enclose, as matrices over pairs (I, J).

I and J alone decide what a stage J∖I sends and receives, but for two things: how many
stages consume a value that leaves it (counted once here) and the links of hops that skip stages
(the neighbouring link is taken, which is at least as fast).  So the figures are exact for values
with one consuming stage next door, and lower bounds always.

An indicator such as "some sink of flow e lies in J∖I" is 1 − Σ_q [I∩C = q]·[J∩C = q] over the
patterns q that ideals leave on the flow's sinks C: a product of one matrix of ideals and another,
summed over all flows by one matrix multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, starmap

import numpy as np
from numpy.typing import NDArray

from pdcompile.cluster import Link, ring_seconds
from pdcompile.passes.partition.model import Model
from pdcompile.plan.evaluate import Deployment
from pdcompile.problem import Holding, StageLimits
from pdcompile.problem.deployment import StageDeployment

Matrix = NDArray[np.float64]
Bool = NDArray[np.bool_]
Rate = tuple[float, float]  # bytes per second, latency
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of a stage's features: where and how it runs, on which links and devices.

    `limit`: bytes of a rank, which holds what `holding` says.  `updates`: microbatches of a
    replica's update, for which its gradients go once around the `ring`.
    """

    speed: float
    option: StageDeployment
    into: Link
    out: Link
    full_duplex: bool
    limit: int | None
    holding: Holding
    ring: Link | None = None
    updates: int = 1

    @staticmethod
    def of(on: Deployment) -> list[Coefficients]:
        """Those of the stages of a deployment."""

        def hop(a: int, b: int) -> Link:
            same = on.ranks[a] == on.ranks[b]
            return StageLimits() if same else on.link(on.ranks[a][0], on.ranks[b][0])

        hops = [StageLimits(), *starmap(hop, pairwise(range(len(on.ranks)))), StageLimits()]
        return [
            Coefficients(
                on.speeds[s], StageDeployment(len(on.ranks[s]), on.recompute[s]), into, out,
                not on.half_duplex[s], on.limits[s], on.holdings[s],
            )
            for s, (into, out) in enumerate(pairwise(hops))
        ]  # fmt: skip


@dataclass
class Segments:
    """Matrices [I, J] for `ideals` (bit masks, the empty set first, the full set last), each made
    on first use; `complete`: these are all ideals of the model."""

    model: Model
    ideals: list[int]
    complete: bool = False
    _links: dict[Rate, tuple[Matrix, ...]] = field(init=False, default_factory=dict)
    # by the two links, and whether they are full duplex
    _sent: dict[tuple[Rate, Rate, bool], Matrix] = field(init=False, default_factory=dict)

    @cached_property
    def stages(self) -> list[Coefficients]:
        """Coefficients of the problem's own stages."""
        return Coefficients.of(Deployment.straight(self.model.problem))

    @cached_property
    def inside(self) -> Bool:
        """[ideal, group]: which groups each ideal has."""
        n = self.model.num_groups
        found = np.array([[mask >> v & 1 for v in range(n)] for mask in self.ideals], dtype=bool)
        return found.reshape(len(self.ideals), n)

    @cached_property
    def nested(self) -> Bool:
        """Pairs that may be a stage: nested, apart, and not empty."""
        numbers = self.inside.astype(np.float64)
        found: Bool = (numbers @ numbers.T) == numbers.sum(1)[:, None]
        np.fill_diagonal(found, False)
        if self.model.apart:
            first, second = (self.inside[:, groups] for groups in np.array(self.model.apart).T)
            neither, both = (~(first | second)).astype(np.float64), first & second
            found &= neither @ both.T == 0
        return found

    @cached_property
    def forward(self) -> Matrix:
        """Seconds of a microbatch at speed 1."""
        return self._own(self.model.forward)

    @cached_property
    def backward(self) -> Matrix:
        return self._own(self.model.backward)

    def compute(self, on: Coefficients, rows: slice = ALL) -> Matrix:
        """Seconds for which a microbatch keeps the devices of a stage busy, one after the other."""
        found: Matrix = on.option.forwards * self.forward[rows] + self.backward[rows]
        return found / on.speed

    def transfer(self, on: Coefficients) -> Matrix:
        """Link seconds of a microbatch: the busier direction, or both on a half-duplex link."""
        key = _rate(on.out), _rate(on.into), on.full_duplex
        if key not in self._sent:
            out_forward, out_backward, _, _, middle = self._at(on.out)
            _, _, in_forward, in_backward, _ = self._at(on.into)
            sent, received = out_forward + in_backward, in_forward + out_backward + middle
            self._sent[key] = np.maximum(sent, received) if on.full_duplex else sent + received
        return self._sent[key]

    def reduction(self, on: Coefficients, rows: slice = ALL) -> Matrix | float:
        """Seconds per microbatch of the stage's all-reduce."""
        if on.ring is None:
            return 0.0
        once = ring_seconds(on.ring, self.byte_tables[0][rows], on.option.replicas)
        found: Matrix = once / on.updates
        return found

    def load(self, on: Coefficients, rows: slice = ALL) -> Matrix:
        """Seconds per microbatch that a stage, or one of its links, is busy."""
        r, traffic = on.option.replicas, self.transfer(on)[rows]
        found: Matrix = np.maximum(
            self.compute(on, rows) / r, traffic / r + self.reduction(on, rows)
        )
        return found

    def loads(self, on: Deployment) -> list[Matrix]:
        """The same of the stages of a deployment; infinite where one lacks memory."""
        return [np.where(self.fits(one), self.load(one), np.inf) for one in Coefficients.of(on)]

    def fits(self, on: Coefficients, rows: slice = ALL) -> Bool | bool:
        """True for what keeps the limit of a rank by the formula."""
        if on.limit is None:
            return True
        found: Bool = self.bytes(on.holding, rows) <= on.limit * (1 + 1e-12) + 0.5
        return found

    def bytes(self, held: Holding, rows: slice = ALL) -> Matrix:
        """Bytes of one rank of a stage, by `Evaluation.memory`'s formula."""
        weights = held.versions / held.readers, held.updated, 1 / held.readers
        counts = *weights, held.saved, held.received, held.returned, 1
        parts = (n * table[rows] for n, table in zip(counts, self.byte_tables, strict=True) if n)
        total: Matrix = sum(parts)  # type: ignore[assignment]
        return total

    @cached_property
    def byte_tables(self) -> tuple[Matrix, ...]:
        """Bytes: trainable, owned (shared ones by their first holder), frozen, saved, received,
        gradients of what is sent, and workspace."""
        model, inside = self.model, self.inside
        trainable, frozen = self._own(model.trainable_bytes), self._own(model.frozen_bytes)
        owned = trainable.copy()
        pattern, column = _patterns(inside, [copy.ends for copy in model.copies])
        for trained, total in ((True, trainable), (False, frozen)):
            weight = np.array([c.bytes * (c.trainable is trained) for c in model.copies])
            if weight.any():
                total += weight.sum() - pattern * weight[column] @ pattern.T
                begun = np.array([inside[:, list(c.ends)].any(1) for c in model.copies])
                owned += _difference(begun.T @ weight) * trained
        forward = np.array([float(flow.received_bytes) for flow in model.flows])
        backward = np.array([flow.returned_bytes for flow in model.flows])
        _, out, received, _, middle = self._passing(forward, backward)
        saved, workspace = self._own(model.saved_bytes), _largest(model, inside)
        return trainable, owned, frozen, saved, received, out + middle, workspace

    def allowed(self, stage: int) -> Bool:
        """Pairs that may be this stage: nested, apart, within memory, and not empty."""
        result = self.nested.copy()
        if self.model.problem.stages[stage].memory_bytes is not None:
            result &= self.fits(self.stages[stage])
        low, high = np.array(self.model.lowest), np.array(self.model.highest)
        # A later stage's group is not in J, an earlier stage's group is in I.
        late: Bool = np.any(self.inside[:, low > stage], axis=1)
        early: Bool = np.all(self.inside[:, high < stage], axis=1)
        result &= ~late[None, :] & early[:, None]
        return result

    def crossing(self, link: Link) -> tuple[Matrix, Matrix]:
        """Seconds of the messages over a cut at each ideal, forward and backward."""
        out_forward, out_backward, *_ = self._at(link)
        return out_forward[0], out_backward[0]

    def _at(self, link: Link) -> tuple[Matrix, ...]:
        """(out forward, out backward, in forward, in backward, middle) seconds on a link."""
        key = _rate(link)
        if key not in self._links:
            flows = self.model.flows
            f = np.array([flow.forward_seconds(link) for flow in flows])
            b = np.array([flow.backward_seconds(link) for flow in flows])
            self._links[key] = self._passing(f, b)
        return self._links[key]

    def _own(self, each: Sequence[float]) -> Matrix:
        """The sum over groups of J∖I."""
        return _difference(self.inside.astype(np.float64) @ np.array(each, dtype=np.float64))

    @cached_property
    def _flows(self) -> tuple[Matrix, Matrix, Matrix, NDArray[np.intp]]:
        """[ideal, flow]: is a source inside, is a sink outside; which pattern of sinks, and the
        flow of each of these columns."""
        flows, inside = self.model.flows, self.inside
        shape = (len(inside), len(flows))
        source, outside = np.zeros(shape), np.zeros(shape)
        for e, flow in enumerate(flows):
            source[:, e] = inside[:, list(flow.sources)].any(1)
            outside[:, e] = ~inside[:, list(flow.sinks)].all(1)
        return source, outside, *_patterns(inside, [flow.sinks for flow in flows])

    def _passing(self, f: Matrix, b: Matrix) -> tuple[Matrix, ...]:
        """The parts of `_at`, of these amounts of each flow."""
        if not f.any() and not b.any():
            return (np.zeros((len(self.ideals), len(self.ideals))),) * 5
        source, outside, pattern, column = self._flows
        leaving = source * outside

        def out(weight: Matrix) -> Matrix:
            # source in J∖I and a sink beyond J
            return (leaving @ weight)[None, :] - (source * weight) @ leaving.T

        def enters(weight: Matrix, beyond: Matrix | None = None) -> Matrix:
            # source in I and a sink in J∖I (and, for `beyond`, a sink outside J)
            left = source[:, column] * pattern * weight[column]
            if beyond is None:
                return (source @ weight)[:, None] - left @ pattern.T
            right = pattern * beyond[:, column]
            return (source * weight) @ beyond.T - left @ right.T

        parts = out(f), out(b), enters(f), enters(b), enters(b, outside)
        return tuple(np.maximum(part, 0.0) for part in parts)


def _rate(link: Link) -> Rate:
    return link.bytes_per_second, link.latency_seconds


def _difference(per_ideal: Matrix) -> Matrix:
    """value(J) − value(I); rounding must not make an empty stage negative."""
    return np.maximum(per_ideal[None, :] - per_ideal[:, None], 0.0)


def _largest(model: Model, inside: Bool) -> Matrix:
    """The largest workspace of a group in J∖I: groups from small to large overwrite."""
    result = np.zeros((len(inside), len(inside)))
    by_size: dict[int, list[int]] = {}
    for v, size in enumerate(model.workspace_bytes):
        by_size.setdefault(size, []).append(v)
    for size, groups in sorted(by_size.items()):
        if size:
            now = inside[:, groups].astype(np.float64)
            held = (now.sum(1)[None, :] - now.sum(1)[:, None]) > 0
            result[held] = size
    return result


def _patterns(inside: Bool, ends: list[tuple[int, ...]]) -> tuple[Matrix, NDArray[np.intp]]:
    """One 0/1 column for every flow and every subset of its ends that some ideal holds."""
    columns: list[Bool] = []
    owner: list[int] = []
    for e, groups in enumerate(ends):
        rows = inside[:, list(groups)]
        if len(groups) == 1:
            columns += [rows[:, 0], ~rows[:, 0]]
            owner += [e, e]
            continue
        _, which = np.unique(np.packbits(rows, axis=1), axis=0, return_inverse=True)
        which = which.reshape(-1)
        for q in range(int(which.max()) + 1):
            columns.append(which == q)
            owner.append(e)
    if not columns:
        return np.zeros((len(inside), 0)), np.zeros(0, dtype=np.intp)
    return np.array(columns).T.astype(np.float64), np.array(owner, dtype=np.intp)
