"""Loading: every rank reads what its own stages need, and changes nothing before all ranks can.

A checkpoint fits any plan of the same model.  What is not the same on every plan are the earlier
weights of schedules that compute on them: they are taken where the checkpoint has all that the plan
names, under the same numbers; else the newest weights take the place of all earlier ones, as at the
beginning of a training, and a note says so.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pdcompile.checkpoint.contents import Contents, open_checkpoint, scheduler_parts
from pdcompile.checkpoint.extra_states import set_extra_states
from pdcompile.checkpoint.generators import restore, states_of
from pdcompile.checkpoint.holding import Holding, HoldingKind
from pdcompile.checkpoint.into_eager import optimizer_parts
from pdcompile.checkpoint.named_optimizer import NamedGroup, check_named, load_named, names_of
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.checkpoint.scheduler_states import merged_state, scheduler_groups
from pdcompile.errors import CheckpointError, some
from pdcompile.position import Accumulated
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.accumulated import resume
from pdcompile.runtime.state.exchange import Exchange, Refused
from pdcompile.runtime.state.holdings import (
    Row,
    all_parameters,
    holdings,
    made_groups,
    older_versions,
)
from pdcompile.warn import warn


class Wanted(NamedTuple):
    """Parts that are to be loaded: the optimizer's state, generators, and schedulers by name.

    `resumes`: there was no optimizer yet that schedulers could be made of.
    """

    optimizer: bool
    random_state: bool
    schedulers: Mapping[str, Any]
    resumes: bool = False


@dataclass
class Prepared:
    """Everything that was read and checked before anything is changed.

    `rows`: of the tensors here that the checkpoint has, `stored`: the stored name of each in the
    model; `apart`: replicas have buffers of their own.
    """

    contents: Contents
    stored: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    accumulated: dict[str, Accumulated] = field(default_factory=dict)
    groups: list[NamedGroup] | None = None  # of the optimizer; None: it is left as it is
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    made: list[NamedGroup] = field(default_factory=list)  # the groups of all ranks, when made
    kept: set[int] = field(default_factory=set)  # ids of groups that keep their own rates
    schedulers: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] | None = None
    apart: bool = False
    notes: list[str] = field(default_factory=list)

    def of(self, row: Row) -> Holding:
        """The holding in the checkpoint whose values a row takes."""
        kind, name, number = row.holding
        return Holding(kind, self.stored.get(name, name), number)

    def of_kinds(self, *kinds: HoldingKind) -> list[Row]:
        """Rows of these kinds."""
        return [row for row in self.rows if row.holding.kind in kinds]


def load(session: Session, exchange: Exchange, folder: Path, wanted: Wanted) -> Contents:
    """Load a checkpoint; nothing is in flight, and all ranks are in this call.

    Raises:
        Refused: a rank cannot load its part, on every rank.
    """

    def opened() -> list[str]:
        found = open_checkpoint(folder)
        return ["" if found.place == folder else found.place.name, found.manifest.identity]

    name, identity = exchange.of_first(opened)
    made = _made(session, exchange)
    before: dict[str, Any] = {}
    prepared: list[Prepared] = []

    def part() -> None:
        contents = Contents(folder / name)
        if contents.manifest.identity != identity:
            raise CheckpointError(
                "this rank sees another checkpoint than rank 0",
                where=str(contents.place),
                remedy="give every rank the path of one folder that all hosts share",
            )
        prepared.append(prepare(session, contents, wanted, made))
        _load_schedulers(prepared[0], wanted, before)

    try:
        exchange.agreed(part, "cannot load its part")
    except Refused:
        for one, state in before.items():
            wanted.schedulers[one].load_state_dict(state)
        raise
    (found,) = prepared
    apply(session, found)
    for note in found.notes if 0 in session.ranks else ():
        warn(note)
    return found.contents


def _made(session: Session, exchange: Exchange) -> list[NamedGroup]:
    """The optimizers' groups of all ranks, as they were made."""
    own = made_groups(session)
    if session.world is None:
        return own
    encoder = Encoder(inline=True)
    told = [[g.place, g.names, encoder.encode(g.values, "groups"), g.kind] for g in own]
    return [
        NamedGroup(place, tuple(names), decode(values, "groups"), kind)
        for groups in exchange.everywhere(told)
        for place, names, values, kind in groups
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
    found = Prepared(contents, {f: contents.first_name(keys) for f, keys in state.names.items()})
    found.made = made
    history = _has_history(session, found)
    for row in holdings(session, contents.position.minibatches):
        kind, name, _ = row.holding
        count = len(session.spec.ranks[row.worker.stage])
        if (
            (kind is HoldingKind.WEIGHT and not row.tensor.is_meta)
            or (kind is HoldingKind.OLDER and history)
            or (kind is HoldingKind.BUFFER and row.holding in contents)
            or (kind is HoldingKind.REPLICA and contents.has_replicas(name, count))
        ):  # fmt: skip
            contents.tensor(found.of(row), row.tensor)
            found.rows.append(row)
    for worker in session.workers:
        for fqn in worker.weights.owned:
            waiting = contents.accumulated(found.stored[fqn])
            if waiting is not None:
                found.accumulated[fqn] = waiting
    if wanted.optimizer:
        _prepare_optimizer(session, found)
    found.apart = any(
        len(ranks) > 1 and contents.has_replicas(fqn, len(ranks))
        for stage, ranks in enumerate(session.spec.ranks)
        for fqn in session.compiled.written_buffers(stage)
    )
    _prepare_loss_scale(session, found)
    _prepare_schedulers(session, found, wanted)
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


def _has_history(session: Session, found: Prepared) -> bool:
    """True if the checkpoint has all earlier weights that the plan computes on; else notes it."""
    contents, position = found.contents, found.contents.position
    missing, surplus = [], []
    for fqn in session.state.trainable():
        there = set(contents.versions(found.stored[fqn]))
        older = older_versions(session, session.state.owner(fqn), position.minibatches)
        if older and not {*older, older.stop} <= there:
            missing.append(fqn)
        if there and min(there) < older.start:
            surplus.append(fqn)
    schedule, new = contents.manifest.schedule, session.spec.name
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
    return not missing


def _prepare_loss_scale(session: Session, found: Prepared) -> None:
    saved = found.contents.manifest.loss_scale
    if saved and session.loss_scale is None:
        found.notes.append("the checkpoint has a loss scale, and no grad_scaler= takes it")
    if session.loss_scale is not None and not saved:
        found.notes.append("the checkpoint has no loss scale: that of grad_scaler= stays as it is")


def _prepare_optimizer(session: Session, found: Prepared) -> None:
    contents, optimizer = found.contents, session.optimizer
    saved = contents.manifest.optimizer
    if optimizer is None:
        return
    if not saved:
        found.notes.append("the checkpoint has no optimizer's state: the optimizer begins anew")
        return
    parameters = all_parameters(session)
    parts = optimizer_parts(contents, optimizer, parameters, found.stored, found.made)
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


def _prepare_schedulers(session: Session, found: Prepared, wanted: Wanted) -> None:
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
        present = type(wanted.schedulers.get(name)).__name__
        if name in wanted.schedulers and present != kind:
            raise CheckpointError(
                f"scheduler {name} was a {kind} when it was saved, and is a {present} now",
                where=f"{found.contents.place}: schedulers",
                remedy="make the scheduler that was saved, or leave it out",
            )
    parameters = all_parameters(session)
    names = {id(parameters[fqn]): one for fqn, one in found.stored.items() if fqn in parameters}
    same_plan = found.contents.manifest.plan == session.plan.hash()
    for name, one in wanted.schedulers.items():
        held = scheduler_groups(one, session.optimizer, names)
        kept = {n for n, (group, _) in enumerate(held) if id(group) in found.kept}
        own = [part for s, part in enumerate(saved[name]) if same_plan and s in session.stages]
        found.schedulers[name] = own or saved[name], [names for _, names in held], kept


def note_on_schedulers(left: Sequence[str]) -> str:
    """Note that a checkpoint has their states, and that they go on from elsewhere."""
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


def apply(session: Session, prepared: Prepared) -> None:
    """Copy what was read into the pipeline."""
    contents, minibatches = prepared.contents, prepared.contents.position.minibatches
    held = [worker.weights for worker in session.workers]
    session.updating = minibatches  # should it end here, weights are half loaded
    for row in prepared.of_kinds(HoldingKind.WEIGHT, HoldingKind.BUFFER):
        session.state.put(row.holding.name, contents.tensor(prepared.of(row)), held)
    set_extra_states(session.model, contents.extra_states())
    session.load({}, minibatches)
    if session.loss_scale is not None:
        session.loss_scale.restart(minibatches, contents.manifest.loss_scale)
    session.end_call()  # all versions are new: what was known of them says nothing
    session.updating = minibatches
    for row in prepared.of_kinds(HoldingKind.OLDER):
        row.tensor.data.copy_(contents.tensor(prepared.of(row)))
        row.worker.weights.starts_anew = False
    resume(session, minibatches, prepared.accumulated)
    if prepared.groups is not None:
        assert session.optimizer is not None
        names = names_of(all_parameters(session))
        load_named(session.optimizer, names, prepared.groups, prepared.state, prepared.made)
    for row in prepared.of_kinds(HoldingKind.REPLICA):
        row.tensor.copy_(contents.tensor(prepared.of(row)))
    session.replicas_apart = prepared.apart  # from here on: an optimizer that loads would flush
    if prepared.generators is not None:
        restore(prepared.generators)
    contents.close()
