"""Session: a compiled pipeline that runs, all ranks of it in this process or one of them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager.optimizers import make_optimizer
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import PdcompileError
from pdcompile.options import Options
from pdcompile.passes.check.programs import Programs
from pdcompile.plan import Plan
from pdcompile.runtime.compute import Compute, Feed
from pdcompile.runtime.failure.agreement import Agreement
from pdcompile.runtime.failure.guarded import Guarded
from pdcompile.runtime.interpreter import Box, Worker, run_together
from pdcompile.runtime.optimizer import Updater
from pdcompile.runtime.random_streams import Streams
from pdcompile.runtime.second_run import SecondRun
from pdcompile.runtime.state.initial import initial_state
from pdcompile.runtime.state.model_state import dtype_of
from pdcompile.runtime.transport.in_process import LocalTransport, Wires
from pdcompile.runtime.transport.launch import World
from pdcompile.runtime.transport.norms import Norms
from pdcompile.runtime.transport.point_to_point import GroupTransport, Transport
from pdcompile.runtime.watch.coupling import refuse_coupled
from pdcompile.runtime.watch.model_watch import ModelWatch
from pdcompile.runtime.watch.optimizer_watch import OptimizerWatch
from pdcompile.runtime.weights import StageWeights
from pdcompile.runtime.wiring import Wiring, wire
from pdcompile.schedule import Schedule
from pdcompile.schedule.spec import Broadcast


class Session(Guarded):
    """What exists after `prepare`.

    `workers` are this process's ranks; `world` is None in one process.
    """

    def __init__(
        self, model: nn.Module, options: Options, compiled: Compiled, world: World | None
    ) -> None:
        plan = compiled.plan
        self.compiled = compiled
        self.options = options
        self.plan = plan
        self.model = model
        self.stages_of_rank = compiled.stages_of_rank
        super().__init__(world, compiled.capture)
        self.ranks = list(self.stages_of_rank) if world is None else [world.rank]
        self.stages = sorted(stage for rank in self.ranks for stage in self.stages_of_rank[rank])
        self._call = 0
        self.state = initial_state(model, options, compiled, self.ranks, world)
        self._stale_copies = False
        self._newest: list[int] = []  # version of each stage's weights after the last call
        self.in_flight = False  # microbatches wait for a later call
        self.agreement: Agreement | None = None
        wires: Wires = defaultdict(deque)
        streams = Streams(plan.training.seed)
        spec = compiled.stream.spec
        self.wirings = _wirings(compiled, self.stages)
        self._programs = Programs(plan, compiled.eval_edges)
        for rank in self.ranks:
            transport: Transport = (
                LocalTransport(rank, wires) if world is None
                else GroupTransport(world.group, rank, int(plan.hash()[:15], 16), spec.reach)
            )  # fmt: skip
            norms = Norms(transport, self.state.owned, self.state.dtypes)
            held = {
                stage: _worker(
                    compiled, stage, self._weights(stage, streams), streams, norms, transport
                )
                for stage in self.stages_of_rank[rank]
            }
            for worker in held.values():
                worker.held = held
            self.workers += held.values()
            if world is not None:
                self.agreement = Agreement(transport, world.size, tuple(compiled.layout.dims))
        self.workers.sort(key=lambda worker: worker.stage)
        refuse_coupled(options.optimizer, self.state.trainable(), self.state.owned)
        self.optimizer = make_optimizer(
            options.optimizer, self.state.optimized(alone=world is None)
        )
        if self.optimizer is not None:
            self.updater = Updater(self.optimizer, spec.reach)
            for worker in self.workers:
                worker.updater = self.updater
        if world is not None:
            self.state.discard_others()
        self._adopt()
        self._watch = _watched(self)
        self._optimizer_watch = OptimizerWatch(self.optimizer)
        self.end_call()

    def _weights(self, stage: int, streams: Streams) -> StageWeights:
        compiled, interface = self.compiled, self.compiled.interfaces[stage]
        taken = {fqn for fqn, stages in self._tied_here() if stage in stages[1:]}

        def tensor(fqn: str) -> Tensor:
            found = self.state.tensors[fqn]
            if fqn in taken:  # the first of these stages has the model's own
                return nn.Parameter(found.detach().clone())
            return found

        weights = StageWeights(
            compiled.stage_classes[stage],
            interface,
            tensor,
            copies=frozenset(tied.fqn for tied in self.plan.tied if stage in tied.stages[1:]),
            versions=compiled.stream.spec.versions(stage),
            apart=compiled.overlaps,
            model=self.model,
        )
        for module in weights.modules:
            streams.attach(module, interface)
        return weights

    def _tied_here(self) -> list[tuple[str, list[int]]]:
        """Tied parameters, with the stages of this process that hold them."""
        mine = set(self.stages)
        return [(one.fqn, [s for s in one.stages if s in mine]) for one in self.plan.tied]

    # -- running -----------------------------------------------------------------------------

    def agree(
        self, call: str, minibatch: int, size: int | None = None, leaves: Any = None
    ) -> int | None:
        """Begin a call on every rank; returns its batch size where it has one."""
        self._call += 1
        for worker in self.workers:
            worker.settle(self._call)
        if self.agreement is None or self.world is None:
            return size
        self.world.ending.called(call, minibatch)
        return self.agreement.reach(call, self._call, minibatch, size, leaves or {})

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which has the outputs and the loss."""
        return max(self.stages_of_rank, key=lambda rank: self.stages_of_rank[rank][-1])

    def train(self, minibatch: int, feeds: list[Feed], *, updates: bool) -> None:
        """One minibatch, with its update or for its gradients alone.

        After the latter the user may change parameters, so that tied copies are old.
        """
        self.refresh(minibatch)
        if updates:
            if len(self.workers) > 1:
                self.updater.warn_of_hooks()
            self.updater.snapshot(minibatch)
        self._stale_copies = bool(self.plan.tied) and not updates
        for worker in () if self.compiled.overlaps else self.workers:
            worker.weights.open_gradients(keep=not updates)
        count = len(feeds[0].sizes)
        program = self._programs.step(count) if updates else self._programs.gradients(count)
        self._run(program, minibatch, feeds)
        self.in_flight = self.compiled.overlaps

    def evaluate(self, minibatch: int, feeds: list[Feed], *, with_loss: bool) -> None:
        """One minibatch forward, on the newest weights; nothing is in flight."""
        program = self._programs.evaluation(len(feeds[0].sizes), with_loss)
        self._run(program, minibatch, feeds)

    def drain(self, minibatch: int) -> None:
        """Finish what is in flight; `minibatch` is the next one."""
        if self.in_flight:
            self._run(self._programs.flush(), minibatch)
            self.in_flight = False

    def refresh(self, minibatch: int) -> None:
        """Bring tied copies up to date while the user has the gradients, and may yet use them."""
        if self._stale_copies:
            self._run(self._programs.refresh(), minibatch)

    def clip(self, minibatch: int, max_norm: float) -> Tensor:
        """Scale what is in .grad by its norm over all ranks; returns the norm."""
        self._run(self._programs.norms(), minibatch, max_norm=max_norm)
        return self.workers[0].norms.total

    def share(self, broadcasts: tuple[Broadcast, ...], box: Box, minibatch: int = 0) -> None:
        """Bring what one rank has to those that need it: it is in their `box` then."""
        self._run(self._programs.share(broadcasts), minibatch, box=box)

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
        with preserved_rng(), torch.enable_grad():  # whatever the caller has switched off
            workers = {worker.stage: worker for worker in self.workers}
            run_together([workers[self.stages_of_rank[rank][0]] for rank in self.ranks], columns)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around the part of a call that runs: what it leaves is not the user's doing."""
        with self.guard():
            yield
            self.end_call()

    # -- what the user does between calls --------------------------------------------------------

    def check_changes(self, training: bool | None = None) -> None:
        """A call is about to begin, which runs modules in training or not (None: not at all):
        take over what the user did since the last one.

        Raises:
            ConfigError: something was done that cannot be taken over.
        """
        try:
            self._watch.check(training=training, in_flight=self.in_flight, rebind=self._rebind)
            self._optimizer_watch.check(in_flight=self.in_flight)
        except PdcompileError as error:
            self.refuse(error)
            raise
        if not self.in_flight:
            self._adopt()

    def _adopt(self) -> None:
        """Nothing is in flight: the stages follow the model's own tensors and hooks."""
        of_stage = {worker.stage: worker.weights for worker in self.workers}
        for weights in of_stage.values():
            weights.adopt()
            weights.adopt_hooks()
        for fqn, stages in self._tied_here():
            for stage in stages[1:]:
                of_stage[stage].follow(fqn, of_stage[stages[0]])
        for weights in of_stage.values():
            weights.renew()

    def _rebind(self, name: str, buffer: Tensor) -> None:
        fqn = self.state.rebind(name, buffer)
        for worker in self.workers:
            worker.weights.rebind(fqn, buffer)

    def end_call(self) -> None:
        """A call ends: what the model holds now is the pipeline's own."""
        held = [worker.weights for worker in self.workers]
        newest = [weights.newest for weights in held]
        steps = [now - then for now, then in zip(newest, self._newest, strict=False)]
        anew = any(weights.starts_anew for weights in held)
        self._newest = [] if anew else newest
        self._watch.remember(
            in_flight=self.in_flight,
            fresh_copies=not self._stale_copies,
            older=[pair for weights in held for pair in weights.older()],
            one_update=bool(steps) and max(steps) <= 1 and not anew,
        )
        self._optimizer_watch.remember(in_flight=self.in_flight)

    def load(self, state: Mapping[str, Tensor], minibatches: int) -> None:
        """Overwrite what this process holds, after so many minibatches; older versions of all
        weights are forgotten."""
        self.state.load(state, [worker.weights for worker in self.workers])
        for worker in self.workers:
            worker.weights.restart(minibatches)


def _watched(session: Session) -> ModelWatch:
    compiled, alone = session.compiled, session.world is None
    stages = set(session.stages)
    return ModelWatch(
        session.model,
        session.options.loss_fn,
        compiled.capture.attributes,
        opaque=[path for stage in stages for path in compiled.interfaces[stage].opaque],
        read=compiled.capture.numbers,
        tied=[one.fqn for one in session.plan.tied if not alone and stages & set(one.stages)],
        several=not alone,
        overlaps=compiled.overlaps,
    )


def _wirings(compiled: Compiled, stages: Iterable[int]) -> dict[tuple[int, bool], Wiring]:
    """By stage, and whether it trains."""
    plan, found = compiled.plan, {}
    for stage in stages:
        one = compiled.interfaces[stage]
        for training, signature, edges in (
            (True, one.train, plan.edges), (False, one.eval, compiled.eval_edges),
        ):  # fmt: skip
            found[stage, training] = wire(stage, len(plan.stages), signature, edges, training)
    return found


def _worker(
    compiled: Compiled,
    stage: int,
    weights: StageWeights,
    streams: Streams,
    norms: Norms,
    transport: Transport,
) -> Worker:
    plan, train = compiled.plan, compiled.capture.train
    again = plan.stages[stage].recompute
    second = SecondRun(weights.modules[0], compiled, stage) if again else None
    compute = Compute(stage, plan.tied, weights, streams, _autocast(plan), second)
    dtype = torch.float32 if train.loss is None else dtype_of(train.values[train.loss].dtype)
    return Worker(stage, compute, plan, weights, norms, transport, dtype)


def _autocast(plan: Plan) -> Callable[[], AbstractContextManager[Any]]:
    if plan.training.autocast is None:
        return nullcontext
    device, _, dtype = plan.training.autocast.rpartition(":")
    return lambda: torch.autocast(device or "cpu", dtype_of(dtype))
