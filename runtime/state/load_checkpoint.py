"""Loading: every rank reads what its own stages need, and changes nothing before all ranks can.

A checkpoint fits any plan of the same model.  What is not the same on every plan are the earlier
weights of schedules that compute on them: they are taken where the checkpoint has all that the plan
names, under the same numbers; else the newest weights take the place of all earlier ones, as at the
beginning of a training, and a note says so.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pdcompile.checkpoint.contents import Contents, open_checkpoint
from pdcompile.checkpoint.conversion import optimizer_loading
from pdcompile.checkpoint.extra_states import (
    fitting_state,
    restore,
    scheduler_groups,
    set_extra_states,
    states_of,
)
from pdcompile.checkpoint.manifest import Holding, HoldingKind, StoredScheduler
from pdcompile.checkpoint.named_optimizer import NamedGroup
from pdcompile.checkpoint.plain_values import decode
from pdcompile.errors import CheckpointError, errors_as, some
from pdcompile.position import Accumulated
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.exchange import Refused, agreed, of_first
from pdcompile.runtime.state.holdings import (
    Row,
    all_parameters,
    holdings,
    older_versions,
    resume_groups,
)
from pdcompile.runtime.state.whole_state import made_groups
from pdcompile.warn import warn


class Wanted(NamedTuple):
    """Parts that are to be loaded: the optimizer's state, generators, and schedulers by name.

    `resumes`: there was no optimizer yet that schedulers could be made of.
    """

    optimizer: bool
    random_state: bool
    schedulers: Mapping[str, Any]
    resumes: bool = False


def load(session: Session, folder: Path, wanted: Wanted) -> Contents:
    """Load a checkpoint; nothing is in flight, and all ranks are in this call.

    Raises:
        Refused: a rank cannot load its part, on every rank.
    """

    def opened() -> list[str]:
        found = open_checkpoint(folder)
        return ["" if found.place == folder else found.place.name, found.manifest.identity]

    name, identity = of_first(session, opened)
    made = made_groups(session)
    begun: list[Loading] = []

    def part() -> None:
        contents = Contents(folder / name)
        if contents.manifest.identity != identity:
            raise CheckpointError(
                "this rank sees another checkpoint than rank 0",
                where=str(contents.place),
                remedy="give every rank the path of one folder that all hosts share",
            )
        begun.append(Loading(session, contents, wanted, made))
        begun[0].prepare()

    try:
        agreed(session, part, "cannot load its part")
    except Refused:
        for one in begun:
            one.undo()
        raise
    begun[0].apply()
    for note in begun[0].notes if session.is_first else ():
        warn(note)
    return begun[0].contents


class Loading:
    """This process's part of a load: all that it needs is read and checked before any of it is
    copied into the pipeline.

    What is large is read again to be copied: all ranks have to know first that nothing is damaged,
    and two copies of a stage may not fit.  `made`: the groups of all ranks' optimizers.
    """

    def __init__(
        self, session: Session, contents: Contents, wanted: Wanted, made: list[NamedGroup]
    ) -> None:
        self.contents, self.notes = contents, list[str]()
        self._session, self._wanted, self._made = session, wanted, made
        self._minibatches = contents.position.minibatches
        self._stored: dict[str, str] = {}  # name in the checkpoint, by name in the model
        self._rows = defaultdict[HoldingKind, list[Row]](list)  # that the checkpoint has
        self._waiting: dict[str, Accumulated] = {}
        self._load_optimizer: Callable[[], None] = lambda: None  # it is left as it is
        self._generators: dict[str, Any] | None = None
        self._before: dict[str, Any] = {}  # of schedulers that were loaded

    def prepare(self) -> None:
        """Read and check all that this process needs.

        Schedulers are the user's, and may refuse: they are loaded while all can still be as it was.

        Raises:
            CheckpointError: it is damaged, or does not fit; nothing but schedulers was changed.
        """
        session, contents, manifest = self._session, self.contents, self.contents.manifest
        names, infos = session.state.names, session.state.infos
        self._stored = contents.stored_names(
            {f: (k, session.state.whole_shape(f), infos[f].dtype) for f, k in names.items()}
        )
        self._prepare_tensors()
        optimizer = session.optimizer if self._wanted.optimizer else None
        if optimizer is not None and not manifest.optimizer:
            self.notes.append("the checkpoint has no optimizer's state: the optimizer begins anew")
        elif optimizer is not None:
            self._load_optimizer = optimizer_loading(
                contents, optimizer, all_parameters(session), self._stored, self._made,
                session.homes.own_values,
            )  # fmt: skip
        if manifest.loss_scale and session.loss_scale is None:
            self.notes.append("the checkpoint has a loss scale, and no grad_scaler= takes it")
        if session.loss_scale is not None and not manifest.loss_scale:
            self.notes.append(
                "the checkpoint has no loss scale: that of grad_scaler= stays as it is"
            )
        saved = contents.schedulers()
        self._check_schedulers(saved)
        contents.extra_states()
        own = session.plan.training.seed
        if manifest.seed != own:
            self.notes.append(
                f"the checkpoint was saved with seed={manifest.seed}, and this pipeline has "
                f"seed={own}: random numbers (dropout) are others from here on"
            )
        if self._wanted.random_state:  # rank 0's where there were more ranks or fewer
            alike = manifest.ranks == session.plan.num_processes
            found = dict(manifest.random_states)
            states = found.get(session.process_number(0) if alike else 0, found.get(0))
            self._generators = states_of(states, f"{contents.place}: random_states")
        self._load_schedulers(saved)

    def undo(self) -> None:
        """Give schedulers the states that they had."""
        for name, state in self._before.items():
            self._wanted.schedulers[name].load_state_dict(state)

    def _own(self, row: Row) -> Tensor:
        """Values that this process takes for a row."""
        stored = self.contents.tensor(self._in_checkpoint(row))
        return self._session.state.own(row.holding.name, stored)

    def _in_checkpoint(self, row: Row) -> Holding:
        """The holding whose values a row takes."""
        kind, name, number = row.holding
        return Holding(kind, self._stored.get(name, name), number)

    def _prepare_tensors(self) -> None:
        session, contents = self._session, self.contents
        history = self._has_history()
        for row in holdings(session, self._minibatches):
            kind, name, _ = row.holding
            count = len(session.spec.ranks[row.worker.stage])
            if (
                (kind is HoldingKind.WEIGHT and not row.tensor.is_meta)
                or (kind is HoldingKind.OLDER and history)
                or (kind is HoldingKind.BUFFER and row.holding in contents)
                or (kind is HoldingKind.REPLICA and contents.has_replicas(name, count))
            ):  # fmt: skip
                shape = session.state.whole_shape(name, row.tensor)
                like = row.tensor.new_empty(shape, device="meta")
                contents.tensor(self._in_checkpoint(row), like)
                self._rows[kind].append(row)
        for fqn in (fqn for worker in session.workers for fqn in worker.weights.owned):
            waiting = contents.accumulated(self._stored[fqn])
            if waiting is not None:
                gradient = waiting.gradient
                own = None if gradient is None else session.state.own(fqn, gradient)
                self._waiting[fqn] = waiting._replace(gradient=own)

    def _has_history(self) -> bool:
        """True if the checkpoint has all earlier weights that the plan computes on; else notes
        it."""
        session, contents = self._session, self.contents
        missing, surplus = [], []
        for fqn in session.state.trainable():
            there = set(contents.versions(self._stored[fqn]))
            older = older_versions(session, session.state.owner(fqn), self._minibatches)
            if older and not {*older, older.stop} <= there:
                missing.append(fqn)
            if there and min(there) < older.start:
                surplus.append(fqn)
        schedule, new = contents.manifest.schedule, session.spec.name
        if missing:
            self.notes.append(
                f"the checkpoint (schedule {schedule}) does not have all earlier weights that "
                f"schedule {new} of this plan computes on, as of {some(missing, 2)}: the newest "
                "weights take their place, as at the beginning of a training"
            )
        elif surplus:
            self.notes.append(
                f"the checkpoint was saved under schedule {schedule}, with earlier weights that "
                f"schedule {new} of this plan does not compute on: training goes on without them"
            )
        return not missing

    def _check_schedulers(self, saved: Mapping[str, Mapping[int, StoredScheduler]]) -> None:
        given, where = self._wanted.schedulers, f"{self.contents.place}: schedulers"
        if missing := [name for name in given if name not in saved]:
            raise CheckpointError(
                f"the checkpoint has no state of scheduler {some(missing)}: it has "
                f"{some([*saved]) or 'none'}",
                where=where,
                remedy="hand over the schedulers that were handed to save, in that order or by "
                "name",
            )
        left = [name for name in saved if name not in given]
        if left and not self._wanted.resumes:
            self.notes.append(note_on_schedulers(left))
        for name, one in given.items():
            was, present = next(iter(saved[name].values())).kind, type(one).__name__
            if present != was:
                raise CheckpointError(
                    f"scheduler {name} was a {was} when it was saved, and is a {present} now",
                    where=where,
                    remedy="make the scheduler that was saved, or leave it out",
                )

    def _load_schedulers(self, saved: Mapping[str, Mapping[int, StoredScheduler]]) -> None:
        session, where = self._session, f"{self.contents.place}: schedulers"
        parameters = all_parameters(session)
        names = {id(parameters[f]): one for f, one in self._stored.items() if f in parameters}
        same_plan = self.contents.manifest.plan == session.plan.hash()
        for name, one in self._wanted.schedulers.items():
            parts = saved[name]
            own = [part for stage, part in parts.items() if same_plan and stage in session.stages]
            groups = scheduler_groups(one, session.optimizer, names)
            state = decode(fitting_state(own or [*parts.values()], groups), where)
            said = f"scheduler {name} ({type(one).__name__}) does not take its state"
            remedy = "make the scheduler as it was when it was saved, or leave it out"
            with errors_as(CheckpointError, said, where, remedy, Exception):
                before = copy.deepcopy(one.state_dict())
                self._before[name] = before
                one.load_state_dict(state)

    def apply(self) -> None:
        """Copy what was read into the pipeline."""
        session, contents, minibatches = self._session, self.contents, self._minibatches
        weights = [worker.weights for worker in session.workers]
        rows = self._rows
        session.updating = minibatches  # should it end here, weights are half loaded
        for row in (*rows[HoldingKind.WEIGHT], *rows[HoldingKind.BUFFER]):
            session.state.put(row.holding.name, contents.tensor(self._in_checkpoint(row)), weights)
        set_extra_states(session.model, contents.extra_states())
        session.load({}, minibatches)
        if session.loss_scale is not None:
            session.loss_scale.restart(minibatches, contents.manifest.loss_scale)
        session.end_call()  # all versions are new: what was known of them says nothing
        session.updating = minibatches
        for row in rows[HoldingKind.OLDER]:
            row.tensor.data.copy_(self._own(row))
            row.worker.weights.starts_anew = False
        resume_groups(session, minibatches, self._waiting)
        self._load_optimizer()
        for row in rows[HoldingKind.REPLICA]:
            row.tensor.copy_(self._own(row))
        session.replicas_apart = any(  # from here on: an optimizer that loads would flush
            len(ranks) > 1 and contents.has_replicas(fqn, len(ranks))
            for stage, ranks in enumerate(session.spec.ranks)
            for fqn in session.compiled.written_buffers(stage)
        )
        if self._generators is not None:
            restore(self._generators)


def note_on_schedulers(left: Sequence[str]) -> str:
    """Note that a checkpoint has their states, and that they go on from elsewhere."""
    return (
        f"the checkpoint has the state of scheduler {some(left)}, which was not handed over: "
        "pipe.load(folder, schedulers=...) sets it"
    )
