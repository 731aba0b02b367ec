"""Session: a compiled pipeline that runs, all ranks of it in this process or one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from pdcompile.batch import FlatCall, microbatch_sizes
from pdcompile.compiled import Compiled
from pdcompile.eager.loss_scale import loss_scale
from pdcompile.eager.randomness import one_thread, preserved_rng
from pdcompile.ir.stage_streams import Streams
from pdcompile.ir.stage_wiring import Wiring, wire
from pdcompile.options import Options
from pdcompile.parts.conversions import using
from pdcompile.parts.hooks import refuse_hooks
from pdcompile.passes.check.programs import Programs, buffers, gradients, norms, refresh
from pdcompile.plan import Edge, Plan
from pdcompile.runtime.device import RankDevice, device_of
from pdcompile.runtime.failure.guarded import Agreement, Guarded
from pdcompile.runtime.failure.instruction_log import Outside
from pdcompile.runtime.failure.nonfinite import NonFiniteCheck
from pdcompile.runtime.interpreter import Box, Worker, run_together
from pdcompile.runtime.optimizer import Updater
from pdcompile.runtime.stage.compute import Compute, Feed
from pdcompile.runtime.stage.homes import Homes
from pdcompile.runtime.stage.host_memory import shared_weights
from pdcompile.runtime.stage.replicas import Replicas, ReplicaWeights
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.state.model_state import initial_state
from pdcompile.runtime.transport.contract import Expected
from pdcompile.runtime.transport.launch import DataPath, World, data_path
from pdcompile.runtime.transport.links import Link, pairs
from pdcompile.runtime.transport.point_to_point import GroupTransport
from pdcompile.runtime.transport.reductions import Board, GroupSums, LocalSums, Norms, Sums
from pdcompile.runtime.watch.model_watch import ModelWatch
from pdcompile.runtime.watch.optimizer_watch import OptimizerWatch, homes_of
from pdcompile.schedule import Schedule
from pdcompile.schedule.spec import Broadcast, with_edges
from pdcompile.warn import warn


class Session(Guarded):
    """A pipeline after `prepare`.

    `workers` are this process's ranks; `world` is None in one process.
    """

    def __init__(
        self, model: nn.Module, options: Options, compiled: Compiled, world: World | None
    ) -> None:
        plan = compiled.plan
        self.compiled = compiled
        self.options = options
        self.plan, self.model = plan, model
        self.stages_of_rank = compiled.stages_of_rank
        super().__init__(world, compiled.capture)
        self.ranks = list(self.stages_of_rank) if world is None else [world.rank]
        self.spec = compiled.stream.spec
        self.stages = sorted({s for rank in self.ranks for s in self.stages_of_rank[rank]})
        self.device = device_of(plan, self.ranks, alone=world is None)
        self.state = initial_state(model, options, compiled, self.ranks, world)
        self.once = shared_weights(self.state, world, self.spec, self.device)
        self.state.place(self.device, at_rest=self.once)
        self._stale_copies = bool(plan.tied and options.held)  # who trained them is another one
        self._newest: list[int] = []  # version of each stage's weights after the last call
        self.in_flight = False  # microbatches wait for a later call
        self.replicas_apart = False  # each has buffers or gradients of its own
        self._uncompared = False  # nor are its weights known to be those of the others
        self.wirings = wirings(compiled, self.stages, compiled.eval_edges)
        path = data_path(plan, alone=True) if world is None else world.path
        self.ordered = path is not DataPath.TAGS
        self._programs = Programs(plan, compiled.eval_edges, ordered=self.ordered)
        self.evaluation_programs, self.first_output = self._programs, 0  # number of its channel
        self.loss_scale = loss_scale(options.grad_scaler, self.spec.lag(0))
        self._made = Workers(self)
        self.workers, self.streams = self._made.in_order, self._made.streams
        if world is not None:
            self.agreement = Agreement(self.workers[0].far, world, tuple(compiled.layout.dims))
        self.homes = Homes(self.state, homes_of(options.optimizer, self.state))
        mine = model if world is None else self.state  # in a process alone, all of the model
        self.optimizer = self.homes.optimizer(options.optimizer, mine.named_parameters())
        if self.optimizer is not None:
            scaled = plan.training.linear_lr_scaling or self.spec.rescales
            alone, scale = len(self.stages) == 1, plan.scale_of if scaled else None
            self.updater = Updater(self.optimizer, self.spec.reach, scale, self.homes, alone=alone)
            for worker in self.workers:
                worker.updater = self.updater
        if world is not None:
            self.state.discard_others(keep=self.options.held)
        self._adopt()
        self._made.compile_ahead()
        # On all ranks, which are to refuse a write alike, whoever holds the values.
        tied = [one.fqn for one in plan.tied if world is not None] + [*self.once]
        self._watch = ModelWatch(model, options.loss_fn, compiled, tied, several=world is not None)
        self._optimizer_watch = OptimizerWatch(self.optimizer, self.loss_scale)
        self.end_call()
        if self._log is not None:
            self._log.enter(Outside.PROGRAM)

    # -- running -----------------------------------------------------------------------------

    def agree(
        self, call: str, minibatch: int, size: int | None = None, flat: FlatCall | None = None
    ) -> int | None:
        """Begin a call on every rank; returns its batch size where it has one."""
        self._call += 1
        if self.world is not None:
            self.world.exit.called(call, minibatch)
        with self.meeting():
            for rank in self.ranks:
                self._made.of_rank[rank].settle(self._call)
            if self.agreement is None:
                return size
            return self.agreement.reach(call, self._call + self.refusals, minibatch, size, flat)

    def train(self, minibatch: int, feeds: list[Feed], *, updates: bool) -> None:
        """One minibatch, with its update or for its gradients alone.

        After the latter the user may change parameters, so that tied copies are old.
        """
        self.updating = minibatch
        self.refresh(minibatch)
        if updates:
            if len(self.workers) > 1:
                self.updater.warn_of_hooks()
            self.updater.snapshot(minibatch)
        self._stale_copies = bool(self.plan.tied) and not updates
        overlaps = self.compiled.overlaps
        for worker in self.workers:
            replicas = worker.replicas
            if replicas is not None:
                replicas.updates, replicas.shown = updates, {}
            if not overlaps:
                worker.weights.open_gradients(keep=not updates, summed=replicas is not None)
        count = len(feeds[0].sizes)
        program = self._programs.step(count) if updates else self._programs.of(gradients, count)
        self._run(program, minibatch, feeds)
        for worker in self.workers if not updates else ():
            worker.weights.give_sums(minibatch)
        self.in_flight = overlaps
        self.replicas_apart = self._made.buffers_part or self.waits_for_more(minibatch + 1)
        self._uncompared = self._made.weights_part

    def waits_for_more(self, minibatches: int) -> bool:
        """True if gradients then wait for other minibatches of their update."""
        return any(minibatches % self.spec.group(s) for s in range(len(self.spec.ranks)))

    def evaluate(self, minibatch: int, feeds: list[Feed], *, with_loss: bool) -> None:
        """One minibatch forward, on the newest weights; nothing is in flight."""
        program = self.evaluation_programs.evaluation(len(feeds[0].sizes), with_loss)
        self._run(program, minibatch, feeds)

    def drain(self, minibatch: int, *, together: bool = True) -> None:
        """Finish what is in flight; `minibatch` is the next one.

        `together`: somebody reads what replicas hold: bring buffers together, and gradients that
        wait for others; compare weights.
        """
        if self.in_flight:
            self.updating = minibatch - 1
            self._run(self._programs.flush(), minibatch)
            self.in_flight = False
        if together and (self.replicas_apart or self._uncompared):
            self._run(self._programs.of(buffers), minibatch)
            self.replicas_apart = self._uncompared = False

    def refresh(self, minibatch: int) -> None:
        """Bring tied copies up to date while the user has the gradients, and may yet use them."""
        if self._stale_copies:
            self._run(self._programs.of(refresh), minibatch)

    def clip(self, minibatch: int, max_norm: float) -> Tensor:
        """Scale what is in .grad by its norm over all ranks; returns the norm."""
        self._run(self._programs.of(norms), minibatch, max_norm=max_norm)
        return self.workers[0].norms.total

    def share(
        self, rows: Iterable[tuple[Broadcast, Tensor | Expected]], minibatch: int = 0
    ) -> dict[tuple[int, int], Tensor]:
        """Bring what one rank has to those that need it: what is here then, by item and microbatch.

        `rows`: each with the tensor, or on other ranks with what would arrive.
        """
        every = dict(rows)
        box: Box = {(one.item, one.microbatch): given for one, given in every.items()}
        self._run(self._programs.share(tuple(every)), minibatch, box=box)
        return {place: found for place, found in box.items() if isinstance(found, Tensor)}

    def _run(
        self,
        program: Schedule,
        base: int,
        feeds: list[Feed] | None = None,
        box: Box | None = None,
        max_norm: float | None = None,
    ) -> None:
        """Interpret a program whose minibatch 0 is number `base`."""
        for n, worker in enumerate(self.workers):
            worker.begin(base, feeds[n] if feeds else None, box, max_norm)
        columns = [program.columns[rank] for rank in self.ranks]
        with _running(self) as check:
            if check is not None and feeds is not None:
                check.take(feeds, warns=self.world is not None)
            run_together([self._made.of_rank[rank] for rank in self.ranks], columns, self._log)
        if self._log is not None:
            self._log.enter(Outside.CALL)

    @contextmanager
    def call(self, minibatch: int | None = None) -> Iterator[None]:
        """Context of the part of a call that runs: what it leaves is not the user's doing.

        `minibatch`: the only one in flight, after whose error the pipeline goes on if it can.
        """
        with self.guard(minibatch):
            yield
            self.end_call()

    # -- what the user does between calls --------------------------------------------------------

    def check_changes(self, training: bool | None = None) -> None:
        """A call is about to begin, which runs modules in training or not (None: not at all):
        take over what the user did since the last one.

        Raises:
            ConfigError: something was done that cannot be taken over.
        """
        with self.refusing():
            self._watch.check(training=training, in_flight=self.in_flight, rebind=self._rebind)
            self._optimizer_watch.check(in_flight=self.in_flight)
            refuse_hooks(self.state.tensors, self.compiled.capture.division)
            for replicas in filter(None, [worker.replicas for worker in self.workers]):
                replicas.refuse_hooks()
        if not self.in_flight:
            self._adopt()

    def _adopt(self) -> None:
        """Let the stages follow the model's own tensors and hooks, as nothing is in flight."""
        for worker in self.workers:
            worker.weights_at = None
            worker.weights.adopt()
            worker.weights.adopt_hooks()
        for fqn, stages in tied_here(self.plan, self.stages):
            for stage in stages[1:]:
                self._made.first[stage].follow(fqn, self._made.first[stages[0]])
        for weights in [worker.weights for worker in self.workers]:
            if weights.starts_anew:  # what the user changes before is part of the new history
                weights.forget()
            if isinstance(weights, ReplicaWeights):
                names = self.state.maxima if self.replicas_apart else None
                weights.follow_buffers(self.state.tensors.__getitem__, names)

    def _rebind(self, name: str, buffer: Tensor) -> None:
        fqn = self.state.rebind(name, buffer)
        for worker in self.workers:
            worker.weights.rebind(fqn, buffer)

    def end_call(self) -> None:
        """A call ends: what the model holds now is the pipeline's own."""
        held = [worker.weights for worker in self.workers]
        newest = [weights.newest for weights in held]
        steps = [now - then for now, then in zip(newest, self._newest, strict=False)]
        self.updating = None
        anew = any(weights.starts_anew for weights in held)
        self._newest = [] if anew else newest
        self._watch.remember(
            in_flight=self.in_flight,
            fresh_copies=not self._stale_copies,
            older=[pair for weights in held for pair in weights.older()],
            one_update=bool(steps) and max(steps) <= 1 and not anew,
        )
        self._optimizer_watch.remember(in_flight=self.in_flight)

    def forget_copies(self) -> None:
        """Another pipeline of the model begins a call, and may train what other ranks copied."""
        if self.world is not None and self.plan.tied and self.failed is None:
            self._stale_copies = True
            self.end_call()

    def load(self, state: Mapping[str, Tensor], minibatches: int) -> None:
        """Overwrite what this process holds, all versions of it, after so many minibatches."""
        # Others may still read what is written here.
        meet = self.world.joint.gather if self.world is not None and self.once else bool
        meet()
        self.state.load(state, [worker.weights for worker in self.workers])
        for worker in self.workers:
            worker.weights.restart(minibatches)
        meet()  # or be about to write it
        if self.loss_scale is not None:
            self.loss_scale.restart(minibatches)
        self._programs.restart(minibatches)
        self._adopt()


@contextmanager
def in_one_thread(session: Session) -> Iterator[None]:
    """Context of a whole call.

    Raises:
        ConfigError: see `pdcompile.eager.randomness.one_thread`.
    """
    with ExitStack() as stack:
        with session.refusing():
            stack.enter_context(one_thread())
        yield


@contextmanager
def _running(session: Session) -> Iterator[NonFiniteCheck | None]:
    """Context of a program: on its device, and whatever the caller has switched off."""
    device = session.device
    apart = session.options.stage_compiler is None  # no code is compiled under a dispatch mode
    rng = preserved_rng(device.device, from_ops=True, apart=apart)
    check = NonFiniteCheck(session.workers) if session.options.detect_nonfinite else None
    part = nullcontext() if session.beside is None else using(session.beside)
    with device.computing(), rng, torch.enable_grad(), check or nullcontext(), part:
        yield check


def wirings(
    compiled: Compiled, stages: Iterable[int], eval_edges: tuple[Edge, ...]
) -> dict[tuple[int, bool], Wiring]:
    """Wiring by stage, and whether it trains."""
    plan, found = compiled.plan, {}
    for stage in stages:
        one = compiled.interfaces[stage]
        for training, signature, edges in (
            (True, one.train, plan.edges), (False, one.eval, eval_edges),
        ):  # fmt: skip
            found[stage, training] = wire(stage, len(plan.stages), signature, edges, training)
    return found


class Workers:
    """Workers of a `Session`.

    `in_order`: by stage, then by replica; `of_rank`: one of the stages of each rank; `first`: the
    weights of each stage, of its first replica here; `buffers_part`: replicas write their own;
    `weights_part`: and have memory of their own for weights, which could differ.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._spec = session, session.spec
        compiled, state = session.compiled, session.state
        if session.world is not None:
            session.world.connect_parts(session.device)
        replicas = list(map(len, self._spec.ranks))
        self.streams = Streams(compiled.plan.training.seed, session.options.stage_compiler)
        kind = compiled.plan.training.kind
        if self.streams.backend is not None and kind.splits_backward:
            late = f"{kind.name!r} is later than forecast"
            warn(f"compiled stages do not split their backward: {late}")
        self._boards: dict[int, Board] = defaultdict(dict)
        self.buffers_part = any(
            count > 1 and compiled.written_buffers(stage) for stage, count in enumerate(replicas)
        )
        self.weights_part = session.world is not None and max(replicas) > 1
        self.first: dict[int, StageWeights] = {}
        self._near: dict[int, dict[int, Worker]] = {}  # of all ranks here
        for rank, stages in self._spec.holders:
            if rank in session.ranks:
                transport, sums = self._transport(rank), self._sums(-1, rank, "norms")
                norms = Norms(
                    sums, rank, state.owned, state.dtypes, session.loss_scale, session.beside
                )
                held = {stage: self._worker(stage, rank, norms, transport) for stage in stages}
                self._near[rank] = held
        every = (worker for held in self._near.values() for worker in held.values())
        self.in_order = sorted(every, key=lambda worker: worker.stage)
        self.of_rank = {rank: next(iter(held.values())) for rank, held in self._near.items()}

    def compile_ahead(self) -> None:
        """Compile this rank's stages for the example's microbatches, while others do theirs."""
        session, layout = self._session, self._session.compiled.layout
        if session.world is None or self.streams.backend is None or session.beside is not None:
            return  # alone nobody waits; and parts would talk to each other
        count = session.plan.training.num_microbatches
        sizes = microbatch_sizes(layout.size, count) if layout.splits else [layout.size]
        with _running(session):
            for worker in self.in_order:
                for size in dict.fromkeys(sizes):
                    worker.compute.compile_ahead(session.wirings[worker.stage, True], size)

    def _transport(self, rank: int) -> GroupTransport | None:
        session, world, data = self._session, self._session.world, None
        if world is None:
            return None
        plan = int(session.plan.hash()[:15], 16)
        if session.ordered:
            evaluation = with_edges(self._spec, session.compiled.eval_edges)
            groups = {
                sum(pair) - world.process: world.subgroup("pairs", pair, session.device)
                for pair in world.pairs(pairs(self._spec, evaluation))
                if world.process in pair
            }
            data = Link(groups, world.process, direct=world.direct)
        return GroupTransport(
            world.joint.group, rank, plan, self._spec.reach, sealed=world.sealed, data=data,
            device=session.device, places=world.places,
        )  # fmt: skip

    def _sums(self, stage: int, rank: int, name: str = "replicas") -> Sums:
        """Over the replicas of a stage, or (−1) over all processes.

        Groups are made in one order on all: pairs, all processes, then stage by stage.  Collectives
        that replicas may come to in unlike orders have groups of different names.
        """
        ranks = tuple(sorted(rank for rank, _ in self._spec.holders))
        if stage >= 0:
            ranks, name = self._spec.ranks[stage], f"{name}/{stage}"
        world, device = self._session.world, self._session.device
        if self._spec.fetched:  # gradients are where weights rest
            device = RankDevice()
        if world is None:
            return LocalSums(self._boards[stage], len(ranks), ranks.index(rank), device)
        processes = world.alike(ranks) if stage >= 0 else tuple(range(world.size))
        group, index = world.subgroup(name, processes, device), processes.index(world.process)
        direct = world.direct and device.queued
        return GroupSums(group, processes, index, device, direct=direct)

    def _worker(
        self, stage: int, rank: int, norms: Norms, transport: GroupTransport | None
    ) -> Worker:
        session, compiled, device = self._session, self._session.compiled, self._session.device
        weights = self._weights(stage)
        compute = Compute(stage, compiled, weights, self.streams, device, session.loss_scale)
        worker = Worker(stage, rank, compute, compiled, weights, norms, transport, device)
        worker.near = self._near
        if len(self._spec.ranks[stage]) > 1:
            state, written = session.state, compiled.written_buffers(stage)
            homes = self._sums(stage, rank, "homes") if self._spec.homes else None
            sums = self._sums(stage, rank)
            worker.replicas = Replicas(sums, weights, written, state.homes, homes, state.maxima)
        return worker

    def _weights(self, stage: int) -> StageWeights:
        session = self._session
        taken = {f for f, s in tied_here(session.plan, session.stages) if stage in s[1:]}

        def tensor(fqn: str) -> Tensor:
            found = session.state.tensors[fqn]
            if fqn in taken:  # the first of these stages has the model's own
                found = found.detach()
                return nn.Parameter(found if fqn in session.once else found.clone())
            return found

        given, once = (stage, session.compiled, tensor, session.model), session.once
        first = self.first.get(stage)
        weights = ReplicaWeights(first, *given) if first else StageWeights(*given, once=once)
        weights.beside = session.beside
        self.first.setdefault(stage, weights)
        for module in weights.modules:
            self.streams.attach(module, session.compiled.interfaces[stage])
        return weights


def tied_here(plan: Plan, stages: Collection[int]) -> list[tuple[str, list[int]]]:
    """Tied parameters, with those of these stages that hold them."""
    return [(one.fqn, [s for s in one.stages if s in stages]) for one in plan.tied]
