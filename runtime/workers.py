"""The workers of one process: every stage of its ranks, with weights, transport and replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager.autocast import autocast_region
from pdcompile.eager.loss_scale import LossScale
from pdcompile.ir.stage_streams import Streams
from pdcompile.plan import Plan
from pdcompile.runtime.device import RankDevice
from pdcompile.runtime.interpreter import Worker
from pdcompile.runtime.stage.compute import Compute, Precision, SecondRun
from pdcompile.runtime.stage.replicas import Replicas, ReplicaWeights
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.state.model_state import State, dtype_of
from pdcompile.runtime.transport.launch import World
from pdcompile.runtime.transport.links import OrderedLink, pairs
from pdcompile.runtime.transport.point_to_point import (
    GroupTransport,
    LocalTransport,
    Transport,
    Wire,
    Wires,
)
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
        self._wires: Wires = defaultdict(Wire)
        self._ordered = world is not None and world.path.ordered
        self._boards: dict[int, Board] = defaultdict(dict)
        self.buffers_part = any(
            len(held) > 1 and compiled.written_buffers(stage)
            for stage, held in enumerate(self._spec.ranks)
        )
        self.weights_part = world is not None and max(map(len, self._spec.ranks)) > 1
        self.first: dict[int, StageWeights] = {}
        self.of_rank: dict[int, Worker] = {}
        self.in_order: list[Worker] = []
        here = [(rank, stages) for rank, stages in self._spec.holders if rank in ranks]
        self._stages = sorted({stage for _, stages in here for stage in stages})
        for rank, stages in here:
            transport = self._transport(rank)
            norms = Norms(self._sums(-1, rank), rank, state.owned, state.dtypes, scale)
            held = {stage: self._worker(stage, norms, transport) for stage in stages}
            for worker in held.values():
                worker.held = held
            self.in_order += held.values()
            self.of_rank[rank] = held[stages[0]]
        self.in_order.sort(key=lambda worker: worker.stage)

    def _transport(self, rank: int) -> Transport:
        if self._world is None:
            return LocalTransport(rank, self._wires)
        plan = int(self._compiled.plan.hash()[:15], 16)
        world, reach, data = self._world, self._spec.reach, None
        if self._ordered:
            evaluation = with_edges(self._spec, self._compiled.eval_edges)
            groups = {
                sum(pair) - rank: world.subgroup(f"pairs/{pair[0]}/{pair[1]}", pair, self._device)
                for pair in pairs(self._spec, evaluation)
                if rank in pair
            }
            data = OrderedLink(rank, groups, direct=world.path.direct)
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

    def _worker(self, stage: int, norms: Norms, transport: Transport) -> Worker:
        plan, train = self._compiled.plan, self._compiled.capture.train
        weights = self._weights(stage)
        again = plan.stages[stage].recompute
        second = SecondRun(weights.modules[0], self._compiled, stage) if again else None
        makes = self._compiled.makes_tensors(stage)
        precision = Precision(partial(self._region, makes), self._scale)
        whole = bool(self._compiled.interfaces[stage].opaque)
        compute = Compute(
            stage, weights, self.streams, precision, second,
            whole=whole, device=self._device,
        )  # fmt: skip
        dtype = torch.float32 if train.loss is None else dtype_of(train.values[train.loss].dtype)
        worker = Worker(stage, compute, plan, weights, norms, transport, dtype, self._device)
        worker.replicas = self._replicas(stage, transport.rank, weights)
        return worker

    @contextmanager
    def _region(self, makes: bool) -> Iterator[None]:
        """Context of model and loss; `makes`: they make tensors of nothing."""
        making = self._device.making() if makes else nullcontext()
        with autocast_region(self._compiled.plan.training.autocast), making:
            yield

    def _weights(self, stage: int) -> StageWeights:
        compiled, interface = self._compiled, self._compiled.interfaces[stage]
        tied = tied_here(compiled.plan, self._stages)
        taken = {fqn for fqn, stages in tied if stage in stages[1:]}

        def tensor(fqn: str) -> Tensor:
            found = self._state.tensors[fqn]
            if fqn in taken:  # the first of these stages has the model's own
                return nn.Parameter(found.detach().clone())
            return found

        stage_class = compiled.stage_classes[stage]
        weights = self.first.get(stage)
        ties = {
            one.fqn: stage == one.stages[0] for one in compiled.plan.tied if stage in one.stages
        }
        if weights is None:
            weights = self.first[stage] = StageWeights(
                stage_class,
                interface,
                tensor,
                tied=ties,
                versions=self._spec.versions(stage),
                apart=compiled.overlaps,
                model=self._model,
                group=self._spec.group(stage),
            )
        else:
            weights = ReplicaWeights(
                weights, stage_class, interface, tensor,
                tied=ties, written=compiled.written_buffers(stage), model=self._model,
            )  # fmt: skip
        for module in weights.modules:
            self.streams.attach(module, interface)
        return weights

    def _replicas(self, stage: int, rank: int, weights: StageWeights) -> Replicas | None:
        ranks = self._spec.ranks[stage]
        if len(ranks) == 1:
            return None
        compiled = self._compiled
        once = not compiled.interfaces[stage].opaque and not compiled.edited(stage)
        # In device order a sum begins where the program says, and no bucket of it before; nor on
        # a device, where it would begin on a thread of autograd's.
        once = once and not self._ordered and not self._device.queued
        sums = self._sums(stage, rank)
        return Replicas(sums, weights, compiled.written_buffers(stage), once=once)


def tied_here(plan: Plan, stages: Collection[int]) -> list[tuple[str, list[int]]]:
    """Tied parameters, with those of these stages that hold them."""
    return [(one.fqn, [s for s in one.stages if s in stages]) for one in plan.tied]
