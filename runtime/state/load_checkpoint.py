"""Loading: every rank reads what its own stages need, and changes nothing before all ranks can.

A checkpoint fits any plan of the same model.  What is not the same on every plan are the earlier
weights of schedules that compute on them: they are taken where the checkpoint has all that the plan
names, under the same numbers; else the newest weights take the place of all earlier ones, as at the
beginning of a training, and a note says so.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pdcompile.checkpoint.contents import Contents, open_checkpoint, scheduler_parts
from pdcompile.checkpoint.extra_states import set_extra_states
from pdcompile.checkpoint.generators import restore, states_of
from pdcompile.checkpoint.into_eager import optimizer_parts
from pdcompile.checkpoint.named_optimizer import NamedGroup, check_named, load_named, names_of
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.checkpoint.scheduler_states import merged_state, scheduler_groups
from pdcompile.errors import CheckpointError, PdcompileError, some
from pdcompile.position import Accumulated, Position
from pdcompile.runtime.interpreter import Worker
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.accumulated import resume
from pdcompile.runtime.state.checkpoint_parts import (
    all_parameters,
    hidden,
    made_groups,
    older_versions,
    owners,
    written_buffers,
)
from pdcompile.runtime.state.exchange import Exchange
from pdcompile.runtime.state.save_checkpoint import error_of, told_of
from pdcompile.warn import warn


class Wanted(NamedTuple):
    """What is to be loaded: the optimizer's state, generators, and schedulers by name.

    `resumes`: there was no optimizer yet that schedulers could be made of.
    """

    optimizer: bool
    random_state: bool
    schedulers: Mapping[str, Any]
    resumes: bool = False


class Loaded(NamedTuple):
    """What became of a load, on every rank: place and position, or why there is none."""

    place: Path | None
    position: Position
    error: PdcompileError | None


@dataclass
class Prepared:
    """Everything that was read and checked before anything is changed.

    `source`: the stored name of each tensor that this process holds; `history`: whether earlier
    weights are taken.
    """

    contents: Contents
    source: dict[str, str] = field(default_factory=dict)
    history: bool = False
    accumulated: dict[str, Accumulated] = field(default_factory=dict)
    groups: list[NamedGroup] | None = None  # of the optimizer; None: it is left as it is
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    made: list[NamedGroup] = field(default_factory=list)  # the groups of all ranks, when made
    kept: set[int] = field(default_factory=set)  # ids of groups that keep their own rates
    schedulers: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] | None = None
    apart: bool = False  # replicas have buffers of their own
    notes: list[str] = field(default_factory=list)


def load(session: Session, exchange: Exchange, folder: Path, wanted: Wanted) -> Loaded:
    """Load a checkpoint; nothing is in flight, and all ranks are in this call."""
    opened = json.loads(exchange.announce(_opened(folder) if 0 in session.ranks else ""))
    if "error" in opened:
        return Loaded(None, Position(), error_of(opened))
    made = _made(session, exchange)
    prepared: Prepared | None = None
    own: PdcompileError | None = None
    told: dict[str, Any] = {}
    before: dict[str, Any] = {}
    try:
        contents = Contents(folder / opened["name"])
        if contents.manifest.identity != opened["identity"]:
            raise CheckpointError(
                "this rank sees another checkpoint than rank 0",
                where=str(contents.place),
                remedy="give every rank the path of one folder that all hosts share",
            )
        prepared = prepare(session, contents, wanted, made)
        _load_schedulers(prepared, wanted, before)
    except PdcompileError as error:
        own, told = error, told_of(error)
    texts = exchange.gather(json.dumps(told))
    closed = json.loads(exchange.announce(_verdict(session, texts)))
    if "error" in closed or prepared is None:
        for name, state in before.items():
            wanted.schedulers[name].load_state_dict(state)
        return Loaded(None, Position(), own or error_of(closed))
    apply(session, prepared, wanted)
    for note in prepared.notes if 0 in session.ranks else ():
        warn(note)
    return Loaded(prepared.contents.place, prepared.contents.position, None)


def _opened(folder: Path) -> str:
    try:
        found = open_checkpoint(folder)
    except (PdcompileError, OSError) as error:
        ours = error if isinstance(error, PdcompileError) else CheckpointError(str(error))
        return json.dumps(told_of(ours))
    name = "" if found.place == folder else found.place.name
    return json.dumps({"name": name, "identity": found.manifest.identity})


def _verdict(session: Session, texts: Sequence[str]) -> str:
    for rank, text in enumerate(texts):
        part = json.loads(text)
        if "error" in part:
            if session.world is not None:
                part["error"][0] = f"rank {rank} cannot load its part: {part['error'][0]}"
            return json.dumps(part)
    return "{}"


def _made(session: Session, exchange: Exchange) -> list[NamedGroup]:
    """The optimizers' groups of all ranks, as they were made."""
    own = made_groups(session)
    if session.world is None:
        return own
    encoder = Encoder(inline=True)
    text = json.dumps([[g.place, g.names, encoder.encode(g.values, "groups"), g.kind] for g in own])
    texts = json.loads(exchange.announce(json.dumps(exchange.gather(text))))
    return [
        NamedGroup(place, tuple(names), decode(values, "groups"), kind)
        for one in texts
        for place, names, values, kind in json.loads(one)
    ]


def prepare(
    session: Session, contents: Contents, wanted: Wanted, made: list[NamedGroup]
) -> Prepared:
    """Read and check all that this process needs.

    What is large is read again to be copied: all ranks have to know first that nothing is damaged,
    and two copies of a stage may not fit.

    Raises:
        CheckpointError: it is damaged, or does not fit; nothing was changed.
    """
    state, infos = session.state, session.state.infos
    contents.check_model(
        {key: (infos[f].shape, infos[f].dtype) for f, keys in state.names.items() for key in keys}
    )
    stored = {fqn: contents.first_name(keys) for fqn, keys in state.names.items()}
    found = Prepared(contents, made=made)
    found.source = {f: one for f, one in stored.items() if not state.tensors[f].is_meta}
    for name in found.source.values():
        contents.weight(name)
    _prepare_history(session, found, stored)
    for worker in session.workers:
        for fqn in worker.weights.owned:
            waiting = contents.accumulated(stored[fqn])
            if waiting is not None:
                found.accumulated[fqn] = waiting
        for fqn in hidden(session, worker.stage):
            contents.buffer([fqn], state.tensors[fqn])
    if wanted.optimizer:
        _prepare_optimizer(session, found, stored)
    found.apart = _prepare_replicas(session, contents)
    _prepare_loss_scale(session, found)
    _prepare_schedulers(session, found, wanted, stored)
    contents.extra_states()
    saved, own = contents.manifest.seed, session.plan.training.seed
    if saved not in (None, own):
        found.notes.append(
            f"the checkpoint was saved with seed={saved}, and this pipeline has seed={own}: random "
            "numbers (dropout) are others from here on"
        )
    if wanted.random_state:
        _prepare_generators(session, found)
    return found


def _prepare_history(session: Session, found: Prepared, stored: Mapping[str, str]) -> None:
    contents, position = found.contents, found.contents.position
    owner, missing, surplus = owners(session), [], []
    for fqn in session.state.trainable():
        there = set(contents.versions(stored[fqn]))
        older = older_versions(session, owner[fqn], position.minibatches)
        if older and not {*older, older.stop} <= there:
            missing.append(fqn)
        if there and min(there) < older.start:
            surplus.append(fqn)
    schedule, new = contents.manifest.schedule, session.spec.name
    found.history = not missing
    if missing:
        found.notes.append(
            f"the checkpoint (schedule {schedule}) does not have all earlier weights that "
            f"schedule {new} of this plan computes on, as of {some(missing, 2)}: the newest "
            "weights take their place, as at the beginning of a training"
        )
    elif surplus:
        found.notes.append(
            f"the checkpoint was saved under schedule {schedule}, with earlier weights that "
            f"schedule {new} of this plan does not compute on: training goes on from the newest"
        )
    for _, fqn, version in _older(session, found) if found.history else ():
        contents.older(stored[fqn], version)


def _older(session: Session, found: Prepared) -> Iterator[tuple[Worker, str, int]]:
    """Earlier weights that this process computes on: on which stage, of what, and which."""
    trained = session.state.trainable()
    for worker in session.workers:
        held = session.compiled.interfaces[worker.stage].parameters
        minibatches = found.contents.position.minibatches
        for version in older_versions(session, worker.stage, minibatches):
            for fqn in held:
                if fqn in trained:
                    yield worker, fqn, version


def _prepare_loss_scale(session: Session, found: Prepared) -> None:
    saved = found.contents.manifest.loss_scale
    if saved and session.loss_scale is None:
        found.notes.append("the checkpoint has a loss scale, and no grad_scaler= takes it")
    if session.loss_scale is not None and not saved:
        found.notes.append("the checkpoint has no loss scale: that of grad_scaler= stays as it is")


def _prepare_optimizer(session: Session, found: Prepared, stored: Mapping[str, str]) -> None:
    contents, optimizer = found.contents, session.optimizer
    saved = contents.manifest.optimizer
    if optimizer is None:
        return
    if not saved:
        found.notes.append("the checkpoint has no optimizer's state: the optimizer begins anew")
        return
    parts = optimizer_parts(contents, optimizer, all_parameters(session), stored, found.made)
    names, found.groups, found.state = parts
    chosen = check_named(optimizer, names, found.groups, found.state, found.made)
    groups = zip(optimizer.param_groups, chosen, strict=True)
    found.kept = {id(group) for group, values in groups if "lr" in group and "lr" not in values}


def _prepare_generators(session: Session, found: Prepared) -> None:
    """The states of this rank's generators, or rank 0's where there were more ranks or fewer."""
    manifest, where = found.contents.manifest, f"{found.contents.place}: random_state"
    alike = session.world is not None and manifest.ranks == session.plan.num_ranks
    others = dict(manifest.random_states) if alike else {}
    found.generators = states_of(others.get(session.ranks[0], manifest.random_state), where)


def _prepare_replicas(session: Session, contents: Contents) -> bool:
    """Read the own buffers of replicas here; whether any replicas of the plan take theirs."""
    counts = [len(ranks) for ranks in session.spec.ranks]
    several = [
        (stage, fqn)
        for stage, count in enumerate(counts)
        for fqn in session.compiled.written_buffers(stage)
        if count > 1 and contents.has_replicas(fqn, count)
    ]
    for _, fqn, index, _ in _own_buffers(session, contents):
        contents.replica(fqn, index)
    return bool(several)


def _own_buffers(session: Session, contents: Contents) -> Iterator[tuple[int, str, int, Tensor]]:
    """Stage, name, replica and tensor of buffers here whose replicas take their own."""
    for worker in session.workers:
        ranks = session.spec.ranks[worker.stage]
        for fqn, tensor in written_buffers(session, worker).items() if len(ranks) > 1 else ():
            if contents.has_replicas(fqn, len(ranks)):
                yield worker.stage, fqn, ranks.index(worker.transport.rank), tensor


def _prepare_schedulers(
    session: Session, found: Prepared, wanted: Wanted, stored: Mapping[str, str]
) -> None:
    saved = scheduler_parts(found.contents)
    missing = [name for name in wanted.schedulers if name not in saved]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no state of scheduler {some(missing)}: it has "
            f"{some([*saved]) or 'none'}",
            where=f"{found.contents.place}: schedulers",
            remedy="hand over the schedulers that were handed to save, in that order or by name",
        )
    left = [name for name in saved if name not in wanted.schedulers]
    if left and not wanted.resumes:
        found.notes.append(note_on_schedulers(left))
    for name, kind in found.contents.manifest.scheduler_types:
        here = type(wanted.schedulers.get(name)).__name__
        if name in wanted.schedulers and here != kind:
            raise CheckpointError(
                f"scheduler {name} was a {kind} when it was saved, and is a {here} now",
                where=f"{found.contents.place}: schedulers",
                remedy="make the scheduler that was saved, or leave it out",
            )
    parameters = all_parameters(session)
    names = {id(parameters[fqn]): one for fqn, one in stored.items() if fqn in parameters}
    same_plan = found.contents.manifest.plan == session.plan.hash()
    for name, one in wanted.schedulers.items():
        held = scheduler_groups(one, session.optimizer, names)
        kept = {n for n, (group, _) in enumerate(held) if id(group) in found.kept}
        own = [part for s, part in enumerate(saved[name]) if same_plan and s in session.stages]
        found.schedulers[name] = own or saved[name], [names for _, names in held], kept


def note_on_schedulers(left: Sequence[str]) -> str:
    """That a checkpoint has their states, and that they go on from elsewhere."""
    return (
        f"the checkpoint has the state of scheduler {some(left)}, which was not handed over: "
        "pipe.load(folder, schedulers=...) sets it"
    )


def _load_schedulers(prepared: Prepared, wanted: Wanted, before: dict[str, Any]) -> None:
    """They are the user's, and may refuse: while all can still be as it was.

    `before` gets the states that they had.
    """
    for name, (parts, groups, kept) in prepared.schedulers.items():
        one = wanted.schedulers[name]
        try:
            before[name] = copy.deepcopy(one.state_dict())
            one.load_state_dict(merged_state(parts, groups, before[name], kept, name))
        except CheckpointError:
            raise
        except Exception as error:  # the user's
            raise CheckpointError(
                f"scheduler {name} ({type(one).__name__}) does not take its state: "
                f"{type(error).__name__}: {error}",
                where=f"{prepared.contents.place}: schedulers",
                remedy="make the scheduler as it was when it was saved, or leave it out",
            ) from error


def apply(session: Session, prepared: Prepared, wanted: Wanted) -> None:
    """Copy what was read into the pipeline."""
    contents, minibatches = prepared.contents, prepared.contents.position.minibatches
    held = [worker.weights for worker in session.workers]
    session.updating = minibatches  # should it end here, weights are half loaded
    for fqn, name in prepared.source.items():
        session.state.put(fqn, contents.weight(name), held)
    set_extra_states(session.model, contents.extra_states())
    for stage in session.stages:
        for fqn in hidden(session, stage):
            value = contents.buffer([fqn], session.state.tensors[fqn])
            if value is not None:
                session.state.put(fqn, value, held)
    session.load({}, minibatches)
    if session.loss_scale is not None:
        session.loss_scale.restart(minibatches, contents.manifest.loss_scale)
    session.end_call()  # all versions are new: what was known of them says nothing
    session.updating = minibatches
    if prepared.history:
        stored = {f: contents.first_name(keys) for f, keys in session.state.names.items()}
        for worker, fqn, version in _older(session, prepared):
            slot = worker.weights.parameter(version, fqn)
            slot.data.copy_(contents.older(stored[fqn], version))
            worker.weights.starts_anew = False
    resume(session, minibatches, prepared.accumulated)
    if prepared.groups is not None:
        assert session.optimizer is not None
        names = names_of(all_parameters(session))
        load_named(session.optimizer, names, prepared.groups, prepared.state, prepared.made)
    for _, fqn, index, tensor in _own_buffers(session, contents):
        tensor.copy_(contents.replica(fqn, index))
    session.replicas_apart = prepared.apart  # from here on: an optimizer that loads would flush
    if prepared.generators is not None:
        restore(prepared.generators)
    contents.close()
