"""The workers of one process: every stage of its ranks, with weights, transport and replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager.loss_scale import LossScale
from pdcompile.ir.stage_streams import Streams
from pdcompile.plan import Plan
from pdcompile.runtime.device import RankDevice
from pdcompile.runtime.interpreter import Worker
from pdcompile.runtime.stage.compute import Compute
from pdcompile.runtime.stage.replicas import Replicas, ReplicaWeights
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.state.model_state import State
from pdcompile.runtime.transport.launch import World
from pdcompile.runtime.transport.links import Link, pairs
from pdcompile.runtime.transport.point_to_point import GroupTransport
from pdcompile.runtime.transport.reductions import Board, GroupSums, LocalSums, Norms, Sums
from pdcompile.schedule.spec import with_edges


class Workers:
    """Workers of a `Session`; `world` is None in one process.

    `in_order`: by stage, then by replica; `of_rank`: one of the stages of each rank; `first`: the
    weights of each stage, of its first replica here; `buffers_part`: replicas write their own;
    `weights_part`: and have memory of their own for weights, which could differ.
    """

    def __init__(
        self, compiled: Compiled, model: nn.Module, state: State, ranks: list[int],
        world: World | None, device: RankDevice, scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        self._compiled, self._model, self._state, self._world = compiled, model, state, world
        self._device, self._scale = device, scale
        self._spec = compiled.stream.spec
        self.streams = Streams(compiled.plan.training.seed)
        self._ordered = world is not None and world.path.ordered
        self._boards: dict[int, Board] = defaultdict(dict)
        self.buffers_part = any(
            len(held) > 1 and compiled.written_buffers(stage)
            for stage, held in enumerate(self._spec.ranks)
        )
        self.weights_part = world is not None and max(map(len, self._spec.ranks)) > 1
        self.first: dict[int, StageWeights] = {}
        self.of_rank: dict[int, Worker] = {}
        self._near: dict[int, dict[int, Worker]] = {}  # of all ranks here
        self.in_order: list[Worker] = []
        here = [(rank, stages) for rank, stages in self._spec.holders if rank in ranks]
        self._stages = sorted({stage for _, stages in here for stage in stages})
        for rank, stages in here:
            transport = self._transport(rank)
            norms = Norms(self._sums(-1, rank), rank, state.owned, state.dtypes, scale)
            held = {stage: self._worker(stage, rank, norms, transport) for stage in stages}
            self._near[rank] = held
            self.in_order += held.values()
            self.of_rank[rank] = held[stages[0]]
        self.in_order.sort(key=lambda worker: worker.stage)

    def _transport(self, rank: int) -> GroupTransport | None:
        if self._world is None:
            return None
        plan = int(self._compiled.plan.hash()[:15], 16)
        world, reach, data = self._world, self._spec.reach, None
        if self._ordered:
            evaluation = with_edges(self._spec, self._compiled.eval_edges)
            groups = {
                sum(pair) - rank: world.subgroup(f"pairs/{pair[0]}/{pair[1]}", pair, self._device)
                for pair in pairs(self._spec, evaluation)
                if rank in pair
            }
            data = Link(groups, rank, direct=world.path.direct)
        return GroupTransport(
            world.group, rank, plan, reach, sealed=world.sealed, data=data, device=self._device
        )

    def _sums(self, stage: int, rank: int) -> Sums:
        """Over the replicas of a stage, or (−1) over all ranks that hold stages.

        Groups are made in one order on all ranks: pairs, all ranks, then stage by stage.
        """
        holders = tuple(sorted(rank for rank, _ in self._spec.holders))
        ranks, name = holders, "norms"
        if stage >= 0:
            ranks, name = self._spec.ranks[stage], f"replicas/{stage}"
        index = ranks.index(rank)
        if self._world is None:
            return LocalSums(self._boards[stage], len(ranks), index, self._device)
        group = self._world.subgroup(name, ranks, self._device)
        direct = self._world.path.direct
        return GroupSums(group, ranks, index, self._device, direct=direct)

    def _worker(
        self, stage: int, rank: int, norms: Norms, transport: GroupTransport | None
    ) -> Worker:
        compiled, device = self._compiled, self._device
        weights = self._weights(stage)
        compute = Compute(stage, compiled, weights, self.streams, device, self._scale)
        worker = Worker(stage, rank, compute, compiled, weights, norms, transport, device)
        worker.near = self._near
        if len(self._spec.ranks[stage]) > 1:
            written = compiled.written_buffers(stage)
            worker.replicas = Replicas(self._sums(stage, rank), weights, written)
        return worker

    def _weights(self, stage: int) -> StageWeights:
        taken = {f for f, s in tied_here(self._compiled.plan, self._stages) if stage in s[1:]}

        def tensor(fqn: str) -> Tensor:
            found = self._state.tensors[fqn]
            if fqn in taken:  # the first of these stages has the model's own
                return nn.Parameter(found.detach().clone())
            return found

        given = stage, self._compiled, tensor, self._model
        first = self.first.get(stage)
        weights = StageWeights(*given) if first is None else ReplicaWeights(first, *given)
        self.first.setdefault(stage, weights)
        for module in weights.modules:
            self.streams.attach(module, self._compiled.interfaces[stage])
        return weights


def tied_here(plan: Plan, stages: Collection[int]) -> list[tuple[str, list[int]]]:
    """Tied parameters, with those of these stages that hold them."""
    return [(one.fqn, [s for s in one.stages if s in stages]) for one in plan.tied]
