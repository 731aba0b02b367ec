"""Saving: the part of a `Pipeline` that keeps a training on disk, and what was recorded of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdcompile.checkpoint.contents import Contents
from pdcompile.checkpoint.folder import OwnCheckpoints, foreign, newest
from pdcompile.errors import CheckpointError, ConfigError, some
from pdcompile.files import is_path
from pdcompile.options import Options
from pdcompile.runtime.pipeline_state import PipelineState
from pdcompile.runtime.recording import Recording, together
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.checkpoint_parts import part_again, replicas_apart
from pdcompile.runtime.state.exchange import Exchange
from pdcompile.runtime.state.load_checkpoint import Wanted, load, note_on_schedulers
from pdcompile.runtime.state.save_checkpoint import Asked, save
from pdcompile.runtime.state.whole_optimizer import Numbers, gather_optimizer, load_optimizer
from pdcompile.schedule.recorded import RecordedEvent
from pdcompile.warn import warn

Folder = str | PathLike[str]


class Saving(PipelineState):
    """The state of a training, by the model's names: it fits every plan of the model."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model, options)
        self._exchange: Exchange | None = None
        self._numbers: Numbers = {}
        self._own = OwnCheckpoints()
        self._left: tuple[str, ...] = ()  # schedulers that were saved, and not handed over yet
        self._resumed: Contents | None = None  # what the pipeline goes on from when it starts
        if options.resume is not None:
            self._resumed = _found(Path(options.resume))
        if self._resumed is not None:
            position = self._resumed.position
            self._num_minibatches = position.minibatches
            self._num_evaluations = position.evaluations

    def save(
        self,
        folder: Folder,
        *,
        keep: int | None = None,
        verify: bool = False,
        schedulers: Any = (),
    ) -> Path:
        """Write a checkpoint into a folder of its own in `folder`, and return its path.

        Every rank calls it, and writes its own stages; all hosts have to see `folder`.  Weights,
        the optimizer's state, all earlier weights that a later minibatch computes on, gradients
        that wait for their group, the position, and the states of generators.  It is complete, or
        it is not there, whenever a process is killed.

        Args:
            keep: how many of this training's last checkpoints stay there; None: all.
            verify: read everything back and compare.
            schedulers: this rank's learning-rate schedulers: one, a list, or a dict by name.

        Raises:
            CheckpointError: it cannot be written; the pipeline and earlier checkpoints are as
                they were.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(
                f"keep={keep!r} is no number of checkpoints", remedy="from 1 up; None keeps all"
            )
        named = _named(schedulers)
        if any(parameter.grad is not None for parameter in self.parameters()):
            warn("gradients in .grad are in no checkpoint: save after optimizer.step()")
        place = _place(folder)
        with self._call("save") as session:
            session.drain(self._num_minibatches, together=False)
            apart = replicas_apart(session)
            session.drain(self._num_minibatches)
            session.refresh(self._num_minibatches)
            saved = save(
                session, self._told(session), place, self.position,
                Asked(keep, verify, named, self._own), apart,
            )  # fmt: skip
            part_again(session, apart)
        if saved.error is not None:
            raise saved.error
        assert saved.place is not None
        return saved.place

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
            loaded = load(session, self._told(session), place, wanted)
        if loaded.error is not None:
            raise loaded.error
        assert loaded.place is not None
        self._own.took(loaded.place)
        self._left = ()
        self._num_minibatches = loaded.position.minibatches
        self._num_evaluations = loaded.position.evaluations
        return loaded.place

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

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The state of the optimizer of the whole model on rank 0, by the names of parameters.

        Every rank calls it; {} on the others.  The form is that of torch.distributed.checkpoint;
        a torch optimizer of the whole model loads it as it is.
        """
        with self._call("full_optimizer_state_dict") as session:
            session.drain(self._num_minibatches)
            return gather_optimizer(session, self._told(session), self._numbers)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of an optimizer of the whole model, on every rank: this process's part.

        What `full_optimizer_state_dict` gave, of any plan, or the ``state_dict()`` of a torch
        optimizer of the whole model.  Flushes first, so every rank calls it.

        Raises:
            InputError: it is of a part of the model, or of another one; nothing was changed.
        """
        if self.optimizer is None:
            raise ConfigError(
                "there is no optimizer (optimizer=None)",
                remedy="give compile an optimizer, or load the state into your own",
            )
        self.flush()
        load_optimizer(self._running, state)
        self._running.end_call()

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
            return together(self._told(session).gather(recording.text()))

    def _told(self, session: Session) -> Exchange:
        if self._exchange is None:
            self._exchange = Exchange(session)
        return self._exchange


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
    if place is None:
        warn(f"there is no checkpoint in {folder}: training starts at its beginning")
        return None
    return Contents(place)


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
