"""Saving: the part of a `Pipeline` that keeps a training on disk, and what was recorded of it.

States that the user takes in mid-stream, of model and optimizer, are of one moment (`FlushFirst`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.checkpoint.contents import Contents
from pdcompile.checkpoint.folder import OwnCheckpoints, foreign, newest
from pdcompile.checkpoint.named_optimizer import refuse_other_part
from pdcompile.errors import CheckpointError, ConfigError, some
from pdcompile.files import is_path
from pdcompile.options import Options
from pdcompile.position import Position, as_position, position_of, with_position
from pdcompile.runtime.pipeline_state import PipelineState
from pdcompile.runtime.recording import Recording, together
from pdcompile.runtime.state.exchange import everywhere
from pdcompile.runtime.state.holdings import replica_buffers, resume_groups
from pdcompile.runtime.state.load_checkpoint import Wanted, load, note_on_schedulers
from pdcompile.runtime.state.save_checkpoint import save
from pdcompile.runtime.state.whole_state import (
    gather_optimizer,
    gather_state,
    load_optimizer,
    made_groups,
)
from pdcompile.schedule.program import RecordedEvent
from pdcompile.warn import warn


class FlushFirst:
    """A hook before state_dict and load_state_dict: every update is done when they begin.

    In copies of what it hooks, pickled ones too, it does nothing.
    """

    def __init__(self, pipe: Any = None) -> None:
        self._pipe = (lambda: None) if pipe is None else weakref.ref(pipe)

    def __call__(self, *_: Any) -> None:
        pipe = self._pipe()
        if pipe is not None and pipe.unsettled:
            pipe.flush()

    def __reduce__(self) -> tuple[Any, ...]:
        return (FlushFirst, ())


def flush_before_state(
    pipe: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, alone: bool
) -> list[Any]:
    """Hook the states of the optimizer and, `alone` in a process, of the model; the handles."""
    handles, first = list[Any](), FlushFirst(pipe)
    every: list[Any] = list(model.modules()) if alone else []  # torch has no types of these
    if optimizer is not None:
        every.append(optimizer)
        handles.append(optimizer.register_load_state_dict_pre_hook(refuse_other_part))
    for one in every:
        handles.append(one.register_state_dict_pre_hook(first))
        handles.append(one.register_load_state_dict_pre_hook(first))
    return handles


Folder = str | PathLike[str]


class Saving(PipelineState):
    """The state of a training, by the model's names: it fits every plan of the model."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model, options)
        self._own = OwnCheckpoints()
        self._left: tuple[str, ...] = ()  # schedulers that were saved, and not handed over yet
        self._resumed: Contents | None = None  # what the pipeline goes on from when it starts
        if options.resume is not None:
            self._resumed = _found(Path(options.resume))
        if self._resumed is not None:
            place = self._resumed.position
            self._num_minibatches, self._num_evaluations = place.minibatches, place.evaluations

    def save(self, folder: Folder, *, keep: int | None = None, schedulers: Any = ()) -> Path:
        """Write a checkpoint into a folder of its own in `folder`, and return its path.

        Every rank calls it, and writes its own stages; all hosts have to see `folder`.  Weights,
        the optimizer's state, all earlier weights that a later minibatch computes on, gradients
        that wait for their group, the position, and the states of generators.  It is complete, or
        it is not there, whenever a process is killed.

        Args:
            keep: how many of this training's last checkpoints stay there; None: all.
            schedulers: this rank's learning-rate schedulers: one, a list, or a dict by name.

        Raises:
            CheckpointError: it cannot be written; the pipeline and earlier checkpoints are as
                they were.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(
                f"keep={keep!r} is no number of checkpoints", remedy="from 1 up; None keeps all"
            )
        named, place, kept = _named(schedulers), _place(folder), self._resumed
        if self._session is None and kept and place.resolve() == kept.place.resolve().parent:
            return kept.place  # nothing has run since
        if any(parameter.grad is not None for parameter in self.parameters()):
            warn("gradients in .grad are in no checkpoint: save after optimizer.step()")
        with self._call("save") as session:
            session.drain(self._num_minibatches, together=False)
            buffers = [*replica_buffers(session)] if session.replicas_apart else []
            apart = [row._replace(tensor=row.tensor.clone()) for row in buffers]
            session.drain(self._num_minibatches)
            session.refresh(self._num_minibatches)
            try:
                made = save(session, place, self.position, named, apart)
            finally:  # each replica goes on with its own
                for row, own in zip(buffers, apart, strict=True):
                    row.tensor.copy_(own.tensor)
                session.replicas_apart = bool(apart) or session.replicas_apart
            if session.is_first:
                self._own.made(made, keep)
            return made

    def load(
        self,
        folder: Folder,
        *,
        optimizer: bool = True,
        schedulers: Any = (),
        random_state: bool = True,
    ) -> Path:
        """Go on from a checkpoint, the last one in `folder` or `folder` itself; returns its path.

        Every rank calls it, and reads its own stages.  It may be of any plan of the same model.

        Args:
            optimizer: False leaves the optimizer as it is.
            schedulers: those that were handed to `save`, in the same form.
            random_state: set the default generators of torch, random and numpy to what they were
                on this rank; on rank 0 where there were more ranks or fewer.

        Raises:
            CheckpointError: it is damaged, or of another model; nothing was changed.
        """
        return self._load(_place(folder), Wanted(optimizer, random_state, _named(schedulers)))

    def _load(self, place: Path, wanted: Wanted) -> Path:
        with torch.inference_mode(False), self._call("load") as session:
            session.drain(self._num_minibatches)
            contents = load(session, place, wanted)
        self._own.took(contents.place)
        self._left = ()
        position = contents.position
        self._num_minibatches, self._num_evaluations = position.minibatches, position.evaluations
        return contents.place

    def _resume(self) -> None:
        """Go on from where `resume=` says, when the pipeline has started."""
        if self._resumed is not None:
            self._load(self._resumed.place, Wanted(True, False, {}, resumes=True))
            self._left = tuple(self._resumed.schedulers()) if 0 in self.ranks else ()

    def _goes_on(self) -> None:
        """Training goes on: warn once where schedulers do not, of the checkpoint resumed from."""
        if self._left:
            warn(note_on_schedulers(self._left))
            self._left = ()

    def state_dict(self) -> dict[str, Tensor]:
        """This process's part of the state, detached, under the model's names: the tensors
        themselves, which where minibatches overlap are of this moment (later updates go to other
        memory).

        Flushes first, so every rank calls it.  Its ``_metadata`` has the `position`.
        """
        with self._call("state_dict") as session:
            session.drain(self._num_minibatches)
            session.refresh(self._num_minibatches)
        return with_position(session.state.part(), self.position)

    def full_state_dict(self) -> dict[str, Tensor]:
        """State of the model on rank 0, copied to the CPU, with the keys of model.state_dict().

        Flushes first, so every rank calls it; {} on the others.  Its ``_metadata``, which
        torch.save keeps, has the `position`.
        """
        with self._call("full_state_dict") as session:
            session.drain(self._num_minibatches)
            state = gather_state(session, self._num_minibatches)
        return with_position(state, self.position) if state else state

    def load_state_dict(
        self, state: Mapping[str, Tensor], *, position: Position | int | None = None
    ) -> None:
        """Load weights and buffers, all or a part; schedules with older weights start afresh.

        Training goes on at the `position` that the state was saved at: minibatches to come draw
        the random numbers that they would have drawn then.  Give `position` (a number of
        minibatches) for a state that has lost its own: one from safetensors, or a dict made of
        it.  With neither, counting goes on.

        Flushes first, so every rank calls it.  Raises InputError for a name or shape that the
        model does not have.
        """
        with self._call("load") as session:
            session.drain(self._num_minibatches)
        found = as_position(position) or position_of(state) or self.position
        session.load(state, found.minibatches)
        resume_groups(session, found.minibatches, {})
        self._num_minibatches, self._num_evaluations = found.minibatches, found.evaluations
        session.end_call()

    def to_model(self) -> nn.Module | None:
        """The trained eager model; under torchrun a copy of it on rank 0, None elsewhere."""
        session = self._running
        if session.world is None:
            self.flush()
            return self._model
        state = self.full_state_dict()
        return session.state.whole_model(state) if session.is_first else None

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The state of the optimizer of the whole model on rank 0, by the names of parameters.

        Every rank calls it; {} on the others.  The form is that of torch.distributed.checkpoint;
        a torch optimizer of the whole model loads it as it is.
        """
        self._check_optimizer("full_optimizer_state_dict")
        with self._call("full_optimizer_state_dict") as session:
            session.drain(self._num_minibatches)
            return gather_optimizer(session, self._num_minibatches)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of an optimizer of the whole model, on every rank: this process's part.

        What `full_optimizer_state_dict` gave, of any plan, or torch's own
        ``get_optimizer_state_dict``.  Flushes first, so every rank calls it.

        Raises:
            InputError: it is of a part of the model, or of another one; nothing was changed.
        """
        self._check_optimizer("load_optimizer_state_dict")
        with self._call("load") as session:
            session.drain(self._num_minibatches)
            made = made_groups(session)
        load_optimizer(session, state, made)
        session.end_call()

    def _check_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise ConfigError(
                "there is no optimizer (optimizer=None)",
                where=call,
                remedy="give compile an optimizer, or ask your own",
            )

    def record(self) -> None:
        """Note from now on when each instruction of this process's ranks begins and ends."""
        recording = Recording()
        for worker in self._running.workers:
            worker.recording = recording

    def recorded(self) -> tuple[RecordedEvent, ...]:
        """The timeline of the last minibatches of all ranks, on rank 0; () on the others.

        Every rank calls it, and has called `record` before.  Flushes first.

        Raises:
            ConfigError: nobody called `record`.
        """
        recording = self._running.workers[0].recording
        if recording is None:
            raise ConfigError(
                "nothing was recorded", remedy="call pipe.record() on every rank before its steps"
            )
        self.flush()
        with self._call("recorded") as session:
            told = everywhere(session, recording.rows())
            return together(chain(*told)) if session.is_first else ()


def _place(folder: Folder) -> Path:
    if not is_path(folder):
        raise ConfigError(f"{folder!r} is no path", remedy="name a folder, such as 'checkpoints'")
    return Path(folder)


def _found(folder: Path) -> Contents | None:
    place = newest(folder)
    if place is None and (there := foreign(folder)):
        raise CheckpointError(
            f"there is no checkpoint to resume from, and {some(there)} there"
            if folder.is_dir()
            else "resume= is to be a folder, and this is a file",
            where=str(folder),
            remedy="give the folder that pipe.save wrote, or one that is empty or not there yet, "
            "where a training begins; weights alone are loaded into the model before compile, or "
            "by weights=",
        )
    if place is None and os.environ.get("RANK", "0") == "0":
        warn(f"there is no checkpoint in {folder}: training starts at its beginning")
    return None if place is None else Contents(place)


def _named(schedulers: Any) -> dict[str, Any]:
    """Schedulers by name; numbers where they have none."""
    if isinstance(schedulers, Mapping):
        named = dict(schedulers)
    elif isinstance(schedulers, Sequence):
        named = {str(n): one for n, one in enumerate(schedulers)}
    else:
        named = {} if schedulers is None else {"0": schedulers}
    for name, one in named.items():
        has = all(callable(getattr(one, m, None)) for m in ("state_dict", "load_state_dict"))
        if not has or not isinstance(name, str):
            raise ConfigError(
                f"schedulers: {name!r} is of type {type(one).__name__}, which has no state",
                remedy="a learning-rate scheduler of torch.optim, a list of them, or a dict",
            )
    return named
