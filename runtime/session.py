"""Session: a prepared pipeline that runs, all ranks of it in this process or one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.errors import (
    ClosedError,
    ConfigError,
    ContractError,
    DeadlockError,
    InputError,
    PdcompileError,
)
from pdcompile.graph import Attr
from pdcompile.options import Options
from pdcompile.plan import Plan
from pdcompile.randomness import preserved_rng
from pdcompile.runtime.calls import digests
from pdcompile.runtime.compute import Compute, Feed
from pdcompile.runtime.contract import Channel, Expected, Kind
from pdcompile.runtime.failure import Failures, describe, place
from pdcompile.runtime.interpreter import Loss, Worker
from pdcompile.runtime.launch import World, check_agreement
from pdcompile.runtime.local import LocalTransport, Wires
from pdcompile.runtime.optimizer import Updater, make_optimizer
from pdcompile.runtime.prepared import Prepared
from pdcompile.runtime.reduce import Norms, clip
from pdcompile.runtime.streams import Streams
from pdcompile.runtime.transport import GroupTransport, PeerLost, Transport
from pdcompile.runtime.weights import StageWeights, set_tensor
from pdcompile.runtime.wiring import Wiring, expected, wire
from pdcompile.schedule import Action, Instruction, Schedule

CALLS = ("step", "forward_backward", "flush", "eval_step", "predict", "clip_grad_norm_",
         "full_state_dict", "close")  # fmt: skip
UPDATES = frozenset(
    (Action.STEP, Action.POST_NORMS, Action.WAIT_NORMS, Action.SEND_WEIGHT,
     Action.WAIT_SEND_WEIGHT, Action.POST_RECV_WEIGHT, Action.WAIT_RECV_WEIGHT)
)  # fmt: skip


class Session:
    """What exists after `prepare`.

    `workers` are this process's ranks; `world` is None in one process.
    """

    def __init__(
        self, model: nn.Module, options: Options, prepared: Prepared, world: World | None
    ) -> None:
        plan = prepared.plan
        self.plan = plan
        self.world = world
        self.model = model
        self.failed: str | None = None
        self.stage_of_rank = _stage_of_rank(plan)
        self.ranks = list(self.stage_of_rank) if world is None else [world.rank]
        self.infos = {**prepared.capture.eval.tensors, **prepared.capture.train.tensors}
        self.holders = {
            fqn: [i.index for i in prepared.interfaces
                  if fqn in (*i.parameters, *i.buffers, *i.constants)]
            for fqn in self.infos
        }  # fmt: skip
        self.owned = [
            tuple(fqn for fqn, info in self.infos.items()
                  if info.requires_grad and self.holders[fqn][0] == stage)
            for stage in self.stage_of_rank.values()
        ]  # fmt: skip
        self.paths = tuple(prepared.layout.dims)
        self._calls = 0
        self._stale_copies = False
        if world is not None:
            check_agreement(world, f"plan {plan.hash()[:16]} with torch {torch.__version__}")
            self._failures = Failures(world.store, world.rank, world.size)
        wires = Wires()
        streams = Streams(plan.training.seed)
        self.tensors: dict[str, Tensor] = {
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
            **prepared.capture.train.tensor_values,
        }
        self.output_ports = {
            True: prepared.interfaces[-1].train.outputs,
            False: prepared.interfaces[-1].eval.outputs,
        }
        self.wirings: dict[tuple[int, bool], Wiring] = {}
        self.workers: list[Worker] = []
        for rank in self.ranks:
            transport: Transport = (
                LocalTransport(rank, wires) if world is None
                else GroupTransport(world.group, rank, int(plan.hash()[:15], 16))
            )  # fmt: skip
            self.workers.append(self._worker(prepared, rank, transport, streams, options))
        self.optimizer = make_optimizer(options.optimizer, self._optimized())
        if self.optimizer is not None:
            self.updater = Updater(self.optimizer)
            for worker in self.workers:
                worker.updater = self.updater
        if world is not None:
            self._discard_others()

    def _worker(
        self, prepared: Prepared, rank: int, transport: Transport, streams: Streams,
        options: Options,
    ) -> Worker:  # fmt: skip
        plan, stage = self.plan, self.stage_of_rank[rank]
        interface = prepared.interfaces[stage]
        copies = frozenset(tied.fqn for tied in plan.tied if stage in tied.stages[1:])

        def tensor(fqn: str) -> Tensor:
            found = self.tensors[fqn]
            if fqn in copies and self.world is None:  # the owner has the model's own
                return nn.Parameter(found.detach().clone())
            return found

        modes = (
            (True, interface.train, plan.edges),
            (False, interface.eval, prepared.eval_edges),
        )
        for training, signature, edges in modes:
            self.wirings[rank, training] = wire(stage, len(plan.stages), signature, edges, training)
        lag = max(i.lag for c in prepared.stream.step(1)[0].columns for i in c)
        weights = StageWeights(
            prepared.stage_classes[stage], interface, tensor, copies=copies, versions=lag + 1
        )
        for module in weights.modules:
            streams.attach(module, interface)
        loss = prepared.capture.train.loss
        values = prepared.capture.train.values
        return Worker(
            Compute(stage, plan.tied, weights, streams, _autocast(plan)),
            plan.tied,
            weights,
            Norms(transport, self.owned, {f: _dtype(i.dtype) for f, i in self.infos.items()}),
            transport,
            num_ranks=len(self.stage_of_rank),
            loss_dtype=torch.float32 if loss is None else _dtype(values[loss].dtype),
            max_norm=plan.training.max_grad_norm,
        )

    @property
    def versions(self) -> int:
        return self.workers[0].weights.versions

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this process updates, in the order of the model."""
        mine = {self.stage_of_rank[rank] for rank in self.ranks}
        for fqn, info in self.infos.items():
            if info.kind == "parameter" and self.holders[fqn][0] in mine:
                parameter = self.tensors[fqn]
                assert isinstance(parameter, nn.Parameter)
                yield fqn, parameter

    def _optimized(self) -> list[tuple[str, nn.Parameter]]:
        if self.world is None:
            return list(self.model.named_parameters())
        return list(self.named_parameters())

    def _discard_others(self) -> None:
        """Other stages' tensors of the model become meta tensors."""
        mine = {self.stage_of_rank[rank] for rank in self.ranks}
        gone: dict[int, Tensor] = {}
        names: list[tuple[str, Tensor]] = [*self.model.named_parameters(remove_duplicate=False)]
        names += self.model.named_buffers(remove_duplicate=False)
        canonical = {id(tensor): fqn for fqn, tensor in self.tensors.items()}
        for name, tensor in names:
            if mine.isdisjoint(self.holders.get(canonical[id(tensor)], mine)):
                meta = gone.setdefault(id(tensor), _meta(tensor))
                set_tensor(self.model, name, meta)

    # -- running -----------------------------------------------------------------------------

    def announce(self, call: str, minibatch: int, size: int | None, leaves: Any) -> int | None:
        """Agree with rank 0 on which call this is; returns the batch size of rank 0.

        Raises ContractError when this rank makes another call, or steps another minibatch.
        """
        self._calls += 1
        transport = self.workers[0].transport
        if self.world is None:
            return size
        transport.settle(self._calls)
        mine = [CALLS.index(call), self._calls, minibatch, -1 if size is None else size]
        mine += digests(leaves, self.paths)
        header = torch.tensor(mine)
        if self.world.rank == 0:
            for peer in range(1, self.world.size):
                transport.send(Channel(Kind.CALL, 0, peer), header, minibatch, deferred=True)
            return size
        wanted = Expected((len(mine),), torch.int64, minibatch)
        arrived = transport.receive(Channel(Kind.CALL, 0, 0), wanted).wait()
        assert arrived is not None
        theirs = arrived.tolist()
        self._compare(theirs, mine, call)
        return size if size is not None else int(theirs[3])

    def _compare(self, theirs: list[int], mine: list[int], call: str) -> None:
        wrong = []
        if theirs[:3] != mine[:3]:
            wrong.append(
                f"is in call {theirs[1]}, {CALLS[theirs[0]]} (minibatch {theirs[2]}); this rank "
                f"is in call {mine[1]}, {call} (minibatch {mine[2]})"
            )
        elif -1 not in (mine[3], theirs[3]) and mine[3] != theirs[3]:
            wrong.append(f"steps {theirs[3]} samples; this rank steps {mine[3]}")
        for path, a, b in zip(self.paths, theirs[4:], mine[4:], strict=True):
            if not wrong and a and b and a != b:
                wrong.append(f"has other values in input {path!r} than this rank")
        if wrong:
            raise ContractError(
                f"rank 0 {wrong[0]}",
                where=f"rank {self.ranks[0]}",
                remedy="make the same calls with the same minibatches on every rank (the same "
                "seed and order in every loader); inputs that a rank does not need may be None",
            )

    def begin_update(self, minibatch: int) -> None:
        """A minibatch with an update begins: fix its learning rates, start from no gradients."""
        assert self.optimizer is not None
        self.updater.snapshot(minibatch)
        if self.versions == 1:
            for worker in self.workers:
                worker.weights.clear_gradients()

    def run(
        self,
        schedule: Schedule,
        base: int,
        skip: frozenset[Action] = frozenset(),
        feeds: list[Feed] | None = None,
    ) -> None:
        """Interpret a program whose minibatch 0 is number `base`, without some actions."""
        for n, worker in enumerate(self.workers):
            worker.begin(base, feeds[n] if feeds else None)
        columns = [schedule.columns[rank] for rank in self.ranks]
        if skip:
            columns = [tuple(i for i in column if i.action not in skip) for column in columns]
        with preserved_rng():
            _run_together(self.workers, columns)
        for worker in self.workers:
            worker.end()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around everything that runs: an error ends the pipeline on every rank."""
        if self.failed is not None:
            raise ClosedError(
                f"the pipeline ended with an error: {self.failed}", remedy="make a new one"
            )
        lost: PeerLost | None = None
        try:
            yield
            return
        except PeerLost as error:
            lost = error
            where = self._place(error)
        except BaseException as error:
            worker = next((w for w in self.workers if w.current is not None), self.workers[0])
            rank, base = worker.transport.rank, worker.base
            self.failed = describe(rank, error, worker.current, base)
            if worker.current is not None:
                error.add_note(f"in {place(rank, error, worker.current, base)}")
            if self.world is not None:
                self._failures.report(self.failed)
                self._abandon()
                self._failures.wait_for_peers()
            raise
        cause = self._failures.cause(lost, where)
        self.failed = cause.message
        self._abandon()
        raise cause

    def _place(self, error: BaseException) -> str:
        worker = self.workers[0]
        return place(worker.transport.rank, error, worker.current, worker.base)

    def _abandon(self) -> None:
        """Close the connections, so that peers stop waiting for this rank."""
        assert self.world is not None
        for worker in self.workers:
            worker.abandon()
        self.world.close()

    def refuse(self, error: PdcompileError) -> None:
        """This rank will not run a call that its peers may have begun."""
        if self.world is not None and self.failed is None:
            self._failures.refuse(f"rank {self.world.rank} refused the call: {error.message}")

    # -- tied copies, norms, state --------------------------------------------------------------

    def touch(self) -> None:
        """The user may update parameters after this call: tied copies will be old."""
        self._stale_copies = bool(self.plan.tied)

    def refresh(self, minibatch: int) -> None:
        """Bring tied copies up to date when the user has had the gradients in between."""
        if not self._stale_copies:
            return
        self._stale_copies = False
        self.run(_refresh(self.plan, self.stage_of_rank), minibatch)

    def total_norm(self, call: int) -> Tensor:
        """The global norm of the gradients in .grad, on every rank."""
        for worker in self.workers:
            worker.norms.post(call, worker.weights.present_gradients())
        totals = [worker.norms.wait(call) for worker in self.workers]
        return totals[0]

    def gather(self) -> dict[str, Tensor]:
        """Every tensor of the model's state by canonical name, copied; on rank 0, else {}."""
        state: dict[str, Tensor] = {}
        transport = self.workers[0].transport
        for number, (fqn, info) in enumerate(self.infos.items()):
            rank = self._rank_of(fqn)
            if info.kind == "constant":
                continue
            if rank in self.ranks and 0 in self.ranks:
                state[fqn] = self.tensors[fqn].detach().to("cpu", copy=True)
            elif rank in self.ranks:
                transport.send(Channel(Kind.STATE, number, 0), self.tensors[fqn], 0).wait()
            elif 0 in self.ranks:
                wanted = Expected(info.shape, _dtype(info.dtype), 0)
                arrived = transport.receive(Channel(Kind.STATE, number, rank), wanted).wait()
                assert arrived is not None
                state[fqn] = arrived
        return state

    def canonical(self, name: str) -> str:
        """The first name of a tensor that may have several."""
        if name in self.infos:
            return name
        return next(fqn for fqn, info in self.infos.items() if name in info.aliases)

    def state(self, keys: tuple[str, ...]) -> dict[str, Tensor]:
        """What this process holds, by the given names of the model's state."""
        mine = {self.stage_of_rank[rank] for rank in self.ranks}
        named = ((key, self.canonical(key)) for key in keys)
        return {
            key: self.tensors[fqn].detach()
            for key, fqn in named
            if not mine.isdisjoint(self.holders[fqn])
        }

    def load(self, state: Mapping[str, Tensor], keys: tuple[str, ...]) -> None:
        """Copy values into every version of what this process holds."""
        unknown = [name for name in state if name not in keys]
        if unknown:
            raise InputError(
                f"the model has nothing called {', '.join(unknown[:5])}",
                remedy="load a state of this model",
            )
        for name, value in state.items():
            shape = self.infos[self.canonical(name)].shape
            if tuple(value.shape) != shape:
                raise InputError(f"{name} is {tuple(value.shape)}, in the model it is {shape}")
        for name, value in state.items():
            fqn = self.canonical(name)
            held = [worker.weights.load(fqn, value) for worker in self.workers]
            if not any(held) and self.tensors[fqn].device.type != "meta":
                self.tensors[fqn].data.copy_(value)

    def clip(self, max_norm: float) -> Tensor:
        """Scale what is in .grad by its norm over all ranks."""
        total = self.total_norm(self._calls)
        for worker in self.workers:
            clip(worker.weights.present_gradients().values(), total, max_norm)
        return total

    def leaf(self, leaf: Any) -> Any:
        """A leaf of the model's output that no op makes: a tensor of the model, a constant."""
        return self.tensors[leaf.fqn].detach() if isinstance(leaf, Attr) else leaf

    def wait_loss(self, loss: Loss) -> Tensor:
        """Wait for a loss; a broken connection ends the pipeline as in a step."""
        if loss.ready():
            return loss.wait()
        with self.guard():
            return loss.wait()

    def share_outputs(self, feed: Feed) -> None:
        """Send the model's outputs from the last rank to all others, and wait for them there."""
        assert self.world is not None
        last = max(self.stage_of_rank, key=lambda rank: self.stage_of_rank[rank])
        transport = self.workers[0].transport
        training = feed.wiring.training
        for number, port in enumerate(self.output_ports[training]):
            channel = Channel(Kind.OUTPUT, 2 * number + training, last)
            for i, size in enumerate(feed.sizes):
                if self.world.rank != last:
                    handle = transport.receive(channel, expected(port, size, feed.minibatch))
                    arrived = handle.wait()
                    assert arrived is not None
                    if number == 0:
                        feed.outputs.append({})
                    feed.outputs[i][port.value] = arrived
                    continue
                for peer in range(self.world.size):
                    if peer != last:
                        to = channel._replace(peer=peer)
                        value = feed.outputs[i][port.value]
                        transport.send(to, value, feed.minibatch, deferred=True)

    def close(self) -> None:
        """Wait until every rank is here, and destroy what the pipeline made."""
        if self.world is not None:
            self.workers[0].transport.settle()
            self.world.group.barrier().wait()
            for worker in self.workers:
                worker.abandon()
            self.world.close()

    def leave(self, error: BaseException) -> None:
        """The user's program ends with an error: let the peers know."""
        self.failed = describe(self.ranks[0], error, None, 0)
        if self.world is not None:
            self._failures.report(self.failed)
            self._abandon()
            self._failures.wait_for_peers()

    def _rank_of(self, fqn: str) -> int:
        stage = self.holders[fqn][0]
        return next(rank for rank, s in self.stage_of_rank.items() if s == stage)


def _run_together(workers: list[Worker], columns: list[tuple[Instruction, ...]]) -> None:
    """Run each rank until it would have to wait, then the next (one rank: just run it).

    Raises DeadlockError when no rank can go on.
    """
    position = [0] * len(workers)
    moved = True
    while moved:
        moved = False
        for n, (worker, column) in enumerate(zip(workers, columns, strict=True)):
            while position[n] < len(column) and worker.ready(column[position[n]]):
                worker.execute(column[position[n]])
                position[n] += 1
                moved = True
    stuck = [
        f"rank {worker.transport.rank} at {column[at].action} of edge {column[at].edge}, "
        f"microbatch {column[at].microbatch}"
        for worker, column, at in zip(workers, columns, position, strict=True)
        if at < len(column)
    ]
    if stuck:
        raise DeadlockError(f"no rank can go on: {'; '.join(stuck)}")


def _refresh(plan: Plan, stage_of_rank: dict[int, int]) -> Schedule:
    """Owners send their tied parameters to the other holders, outside any update."""
    rank_of = {stage: rank for rank, stage in stage_of_rank.items()}
    columns: dict[int, list[Instruction]] = {rank: [] for rank in stage_of_rank}
    for part in (Action.POST_RECV_WEIGHT, Action.SEND_WEIGHT, Action.WAIT_RECV_WEIGHT,
                 Action.WAIT_SEND_WEIGHT):  # fmt: skip
        for index, tied in enumerate(plan.tied):
            owner = tied.stages[0]
            for holder in tied.stages[1:]:
                sends = part in (Action.SEND_WEIGHT, Action.WAIT_SEND_WEIGHT)
                here, there = (owner, holder) if sends else (holder, owner)
                ins = Instruction(part, here, edge=index, peer=rank_of[there])
                columns[rank_of[here]].append(ins)
    return Schedule("refresh", tuple(tuple(columns[rank]) for rank in sorted(columns)))


def _stage_of_rank(plan: Plan) -> dict[int, int]:
    stages: dict[int, int] = {}
    for stage in plan.stages:
        if stage.replicas != 1:
            raise ConfigError(
                f"stage {stage.index} has {stage.replicas} replicas, which are planned and "
                "simulated but do not run yet",
                where=f"plan: stages[{stage.index}].replicas",
                remedy="plan with one replica a stage",
            )
        stages[stage.ranks[0] if stage.ranks else len(stages)] = stage.index
    return dict(sorted(stages.items()))


def _autocast(plan: Plan) -> Callable[[], AbstractContextManager[Any]]:
    if plan.training.autocast is None:
        return nullcontext
    device, _, dtype = plan.training.autocast.rpartition(":")
    return lambda: torch.autocast(device or "cpu", _dtype(dtype))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
