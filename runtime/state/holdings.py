"""Table of what this process holds of a pipeline; states are loops over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from pdcompile.checkpoint.extra_states import scheduler_groups, scheduler_state
from pdcompile.checkpoint.manifest import (
    Holding,
    HoldingKind,
    StageState,
    StoredGroup,
    StoredScheduler,
)
from pdcompile.checkpoint.named_optimizer import (
    named_groups,
    named_state,
    names_of,
    settings,
)
from pdcompile.checkpoint.plain_values import Encoder
from pdcompile.position import Accumulated
from pdcompile.runtime.interpreter import Worker
from pdcompile.runtime.session import Session
from pdcompile.warn import warn


class Row(NamedTuple):
    """One tensor that this process holds; `owned`: of all ranks this one shows and saves it."""

    holding: Holding
    tensor: Tensor
    worker: Worker
    owned: bool


def holdings(session: Session, minibatches: int) -> Iterator[Row]:
    """Rows of all kinds but the optimizer's, whose tensors lie in values of its own."""
    state = session.state
    by_replica = sorted(session.workers, key=partial(writes, session))
    first = {worker.stage: worker for worker in by_replica}  # of each stage here
    names = state.names
    for fqn in (fqn for fqn in state.infos if fqn in names):
        worker = first.get(state.owner(fqn), session.workers[0])
        owned = worker.stage == state.owner(fqn) and writes(session, worker)
        if owned or not state.tensors[fqn].is_meta:
            yield Row(Holding(HoldingKind.WEIGHT, fqn), state.tensors[fqn], worker, owned)
    for stage, worker in first.items():
        for fqn in hidden(session, stage):
            buffer = Holding(HoldingKind.BUFFER, fqn)
            yield Row(buffer, state.tensors[fqn], worker, writes(session, worker))
    waiting, trained = held(session, minibatches), state.trainable()
    for worker in session.workers:
        weights, saves = worker.weights, writes(session, worker)
        for version in older_versions(session, worker.stage, minibatches):
            for fqn in session.compiled.interfaces[worker.stage].parameters:
                if fqn in trained:
                    older = Holding(HoldingKind.OLDER, fqn, version)
                    owned = saves and fqn in weights.owned
                    yield Row(older, weights.parameter(version, fqn), worker, owned)
        for fqn in weights.owned if saves else ():
            if fqn in waiting and (gradient := waiting[fqn].gradient) is not None:
                yield Row(Holding(HoldingKind.ACCUMULATED, fqn), gradient, worker, True)
    yield from replica_buffers(session)


def whole_rows(session: Session, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that this process shows and saves, with tensors as the model has them: the parts of
    a stage make them together, and the first one has them."""
    for row in rows:
        if row.owned:
            whole = session.state.whole(row.holding.name, row.tensor)
            if session.is_first_part:
                yield row._replace(tensor=whole)


def stage_states(
    session: Session, minibatches: int, schedulers: Mapping[str, Any] | None = None
) -> list[tuple[StageState, dict[str, Tensor]]]:
    """State of each stage of which this process has the first replica, with the tensors of its
    optimizer by the names that it has for them; of others that are homes, the optimizer's alone.

    Raises:
        CheckpointError: a value has no place in a file without code.
        InputError: the optimizer keeps something that belongs to no parameter.
    """
    made, waiting = session.optimizer, held(session, minibatches)
    names = names_of(all_parameters(session))
    state = {} if made is None else _whole(session, named_state(made, names))
    groups = [] if made is None else named_groups(made, names)
    told = [
        (name, type(its).__name__, scheduler_groups(its, made, names), scheduler_state(name, its))
        for name, its in (schedulers or {}).items()
    ]
    found = []
    for worker in session.workers:
        first, homes = writes(session, worker), session.homes
        if not (first or (session.world is not None and session.spec.gathers(worker.stage))):
            continue
        first = first and session.is_first_part
        stage, encoder, owned = worker.stage, Encoder(), worker.weights.owned

        def own(names: Sequence[str], stage: int = stage) -> tuple[str, ...]:
            return tuple(name for name in names if session.state.owner(name) == stage)

        values = session.updater.values_of(stage) if groups else []
        stored = [
            StoredGroup(own(one.names), encoder.encode(settings(v), f"groups/{n}"), one.kind)
            for n, (one, v) in enumerate(zip(groups, values, strict=True))
            if first
        ]
        one = StageState(
            stage=stage,
            trained=owned if first else (),
            updates=minibatches // session.spec.group(stage),
            older=tuple(older_versions(session, stage, minibatches)),
            waiting=max((waiting[f].minibatches for f in owned if f in waiting), default=0),
            groups=tuple(stored),
            state={f: encoder.encode(dict(state[f]), f) for f in own([*state]) if homes.saves(f)},
            schedulers=tuple(
                StoredScheduler(n, kind, tuple(map(own, held)), its)
                for n, kind, held, its in told
                if first
            ),
        )
        found.append((one, encoder.tensors))
    return found


def _whole(session: Session, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of whole parameters, where parts have slices: what has a parameter's
    shape is sliced as it is.  Of what is stepped whole its home has it."""
    shapes = {fqn: tensor.shape for fqn, tensor in all_parameters(session).items()}
    homes = session.homes

    def whole(fqn: str, value: Any) -> Any:
        sliced = isinstance(value, Tensor) and value.dim() > 0 and value.shape == shapes.get(fqn)
        return session.state.whole(fqn, value) if sliced and fqn not in homes.of else value

    here = {fqn: dict(one) for fqn, one in state.items() if homes.at_home(fqn)}
    return {f: {key: whole(f, one) for key, one in of.items()} for f, of in here.items()}


def replica_buffers(session: Session) -> Iterator[Row]:
    """Rows of the buffers that training writes on stages with replicas, of each replica here."""
    for worker in session.workers:
        ranks = session.spec.ranks[worker.stage]
        names = session.compiled.written_buffers(worker.stage) if len(ranks) > 1 else ()
        for fqn, tensor in worker.weights.buffers(names).items():
            index = ranks.index(worker.rank)
            yield Row(Holding(HoldingKind.REPLICA, fqn, index), tensor, worker, True)


def writes(session: Session, worker: Worker) -> bool:
    """True if a worker is the first replica of its stage."""
    return worker.rank == session.spec.ranks[worker.stage][0]


def hidden(session: Session, stage: int) -> list[str]:
    """Tensors of a stage that training writes, and that state dicts leave out."""
    kept = session.state.names
    return sorted(fqn for fqn in session.compiled.written_buffers(stage) if fqn not in kept)


def older_versions(session: Session, stage: int, minibatches: int) -> range:
    """The numbers of the weights, but for the newest, that later minibatches run on."""
    newest = minibatches // session.spec.group(stage)
    return range(max(newest - session.spec.lag(stage), 0), newest)


def held(session: Session, minibatches: int) -> dict[str, Accumulated]:
    """Gradients that wait on the stages of this process; after a drain, `minibatches` so far."""
    found: dict[str, Accumulated] = {}
    for worker in session.workers:
        weights = worker.weights
        count = min(minibatches % weights.group, minibatches - weights.begun)
        if worker.replicas is not None and count:
            shown = worker.replicas.shown
            found |= {f: Accumulated(count, shown.get(f)) for f in worker.weights.owned}
    return found


def resume_groups(
    session: Session, minibatches: int, accumulated: Mapping[str, Accumulated]
) -> None:
    """Go on within groups, with the gradients that a checkpoint holds of their beginnings; warns of
    those that are in no update."""
    for worker in session.workers:
        if worker.replicas is not None and worker.replicas.resume(minibatches, accumulated):
            continue
        owned, group = worker.weights.owned, worker.weights.group
        known = max((accumulated[f].minibatches for f in owned if f in accumulated), default=0)
        within = minibatches % group
        if owned and (known or within):
            warn(
                f"training goes on after {minibatches} minibatches: stage {worker.stage} updates "
                f"after every {group}, {within} of the present group are over, and the gradients "
                f"of {known} are there; they are in no update"
            )


def all_parameters(session: Session) -> dict[str, Tensor]:
    """Parameters of the whole model as an optimizer has them, frozen ones too."""
    infos, tensors = session.state.infos, session.state.tensors | session.homes.wholes
    return {fqn: tensors[fqn] for fqn in infos if infos[fqn].kind == "parameter"}
