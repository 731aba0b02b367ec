"""Contents: a checkpoint on disk, every part of it by the model's names."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pdcompile.checkpoint.folder import TensorFile, newest
from pdcompile.checkpoint.manifest import (
    ANOTHER,
    PLAN,
    Holding,
    HoldingKind,
    Manifest,
    StageState,
    StoredFile,
    StoredScheduler,
    StoredTensor,
    read_manifest,
)
from pdcompile.checkpoint.named_optimizer import NamedGroup
from pdcompile.checkpoint.plain_values import decode
from pdcompile.errors import CheckpointError, did_you_mean, errors_as, some
from pdcompile.files import read_limited
from pdcompile.ir.targets import dtype_name
from pdcompile.position import Accumulated, Position
from pdcompile.weights.tensor_files import INDEX


class Contents:
    """A checkpoint that is read tensor by tensor, each compared with its checksum.

    Raises:
        CheckpointError: here and everywhere, for what is damaged, missing or of another model.
    """

    def __init__(self, place: Path) -> None:
        self.manifest: Manifest = read_manifest(place)
        self.place = place
        self._files: dict[str, TensorFile] = {}
        self._read: dict[tuple[int, str], Tensor] = {}  # of the optimizer, by stage and name
        self._weights: dict[str, StoredTensor] = {}
        self._trained = {name: one for one in self.manifest.stages for name in one.trained}
        self._placed: dict[tuple[str, str], StoredFile] = {}  # by `Holding.place`
        #: of replicas that are homes each has a file
        self._of_optimizers: dict[tuple[int, str], StoredFile] = {}
        for stage in self.manifest.stages:
            self._weights |= {one.name: one for one in stage.weights.tensors}
            for file in stage.files:
                self._placed |= {(str(file.ending), one.name): file for one in file.tensors}
                if str(file.ending).startswith(HoldingKind.OPTIMIZER.value[0]):
                    self._of_optimizers |= {(stage.stage, one.name): file for one in file.tensors}
        self._first = {**{name: name for name in self._weights}, **dict(self.manifest.aliases)}

    @property
    def position(self) -> Position:
        return Position(self.manifest.minibatches, self.manifest.evaluations)

    def stored_names(
        self, model: Mapping[str, tuple[Sequence[str], tuple[int, ...], str]]
    ) -> dict[str, str]:
        """The name under which each tensor of a model is stored.

        Args:
            model: by any name, its keys in a state dict, its shape and its dtype.

        Raises:
            CheckpointError: a key is missing on one side, a shape or dtype is another, or tensors
                are tied on one side alone.
        """
        tensors = {key: kind for keys, *kind in model.values() for key in keys}
        missing = [name for name in tensors if name not in self._first]
        known = {self._first[name] for name in tensors if name in self._first}
        unknown = [name for name in self._weights if name not in known]
        if missing or unknown:
            parts = [f"the model has {some(missing)}, the checkpoint does not"] if missing else []
            parts += [f"the checkpoint has {some(unknown)}, the model does not"] if unknown else []
            near = did_you_mean(missing[0], unknown or self._first) if missing else ""
            raise CheckpointError(
                "; ".join(parts),
                where=str(self.place),
                remedy=f"{near}load a checkpoint of this model",
            )
        for name, (shape, dtype) in tensors.items():
            stored = self._weights[self._first[name]]
            if (stored.shape, stored.dtype) != (shape, dtype):
                raise self._unlike(name, (stored.dtype, stored.shape), (dtype, shape))
        return {name: self._first_name(keys) for name, (keys, *_) in model.items()}

    def _unlike(self, name: str, stored: tuple[Any, Any], own: tuple[Any, Any]) -> CheckpointError:
        return CheckpointError(
            f"{name} is {stored[0]} {stored[1]} in the checkpoint, in the model {own[0]} {own[1]}",
            where=str(self.place),
            remedy="build the model with the sizes and dtypes that it was saved with",
        )

    def _first_name(self, names: Sequence[str]) -> str:
        found = {self._first[name] for name in names}
        if len(found) != 1:
            raise CheckpointError(
                f"{some(names)} are one tensor in the model, and there are {len(found)} in the "
                "checkpoint",
                where=str(self.place),
                remedy="load a checkpoint of this model, with the same tied parameters",
            )
        return found.pop()

    def __contains__(self, holding: Holding) -> bool:
        return holding.place in self._placed

    def tensor(self, holding: Holding, like: Tensor | None = None) -> Tensor:
        key = holding.place[1]
        if holding not in self:
            raise CheckpointError(f"{key} is in no file", where=str(self.place), remedy=ANOTHER)
        found = self._file(self._placed[holding.place]).tensor(key)
        if like is not None:
            stored, own = ((dtype_name(one.dtype), tuple(one.shape)) for one in (found, like))
            if stored != own:
                raise self._unlike(holding.name, stored, own)
        return found

    def versions(self, name: str) -> list[int]:
        """The numbers of the weights that are stored of a parameter: the newest is the last."""
        stage = self._trained.get(name)
        return [] if stage is None else [*stage.older, stage.updates]

    def has_replicas(self, name: str, count: int) -> bool:
        """True if each of so many replicas, and no other, has a buffer of its own of this name."""
        there = [Holding(HoldingKind.REPLICA, name, n) in self for n in range(count + 1)]
        return there == [True] * count + [False]

    def accumulated(self, name: str) -> Accumulated | None:
        """The gradient of a parameter that waits for the rest of its group; None: none does."""
        stage, holding = self._trained.get(name), Holding(HoldingKind.ACCUMULATED, name)
        if stage is None or not stage.waiting:
            return None
        return Accumulated(stage.waiting, self.tensor(holding) if holding in self else None)

    # -- the optimizer -------------------------------------------------------------------------

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """State that the optimizer keeps of a parameter; {}: none."""
        where = f"{self.place}: optimizer state of {name}"
        for stage in self.manifest.stages:
            if name in stage.state:
                read = partial(self._of_optimizer, stage)
                return _dict(stage.state[name], where, "the optimizer's state is", read)
        return {}

    def groups(self) -> list[NamedGroup]:
        """The optimizer's param_groups, stage after stage."""
        found = []
        for stage in self.manifest.stages:
            for n, group in enumerate(stage.groups):
                where = f"{self.place}: stages[{stage.stage}].groups[{n}]"
                read = partial(self._of_optimizer, stage)
                values = _dict(group.values, where, "the optimizer's settings are", read)
                found.append(NamedGroup(n, group.names, values, group.kind))
        return found

    def _of_optimizer(self, stage: StageState, name: str) -> Tensor:
        place = stage.stage, name
        if place not in self._of_optimizers:
            raise CheckpointError(f"{name} is in no file", where=str(self.place), remedy=ANOTHER)
        if place not in self._read:
            self._read[place] = self._file(self._of_optimizers[place]).tensor(name)
        return self._read[place]

    def schedulers(self) -> dict[str, dict[int, StoredScheduler]]:
        """Each scheduler that was handed over, by stage, as the rank of that had it."""
        found: dict[str, dict[int, StoredScheduler]] = {}
        for stage in self.manifest.stages:
            for one in stage.schedulers:
                found.setdefault(one.name, {})[stage.stage] = one
        return found

    def extra_states(self) -> dict[str, Any]:
        """Values that modules keep beside tensors, by their keys in a state dict."""
        where, found = f"{self.place}: extra_states", self.manifest.extra_states
        return {name: decode(one, where) for name, one in found.items()}

    # -- files ---------------------------------------------------------------------------------

    def _file(self, stored: StoredFile) -> TensorFile:
        if stored.name not in self._files:
            self._files[stored.name] = TensorFile(self.place, stored)
        return self._files[stored.name]

    def plan_text(self) -> str:
        """The plan that it was saved with, as JSON."""
        path, data = self._bytes(PLAN)
        if zlib.crc32(data) != self.manifest.plan_crc32:
            raise CheckpointError(
                "the plan is damaged: its checksum does not fit",
                where=str(path),
                remedy="load with a plan of your own (plan=), or let it be planned anew",
            )
        return data.decode(errors="replace")

    def _check_index(self) -> None:
        path, data = self._bytes(INDEX)
        if data != self.manifest.index():
            raise CheckpointError(
                "the index of the weights is damaged: it names others than the manifest",
                where=str(path),
                remedy="load with pipe.load or load_checkpoint, which read no index",
            )

    def _bytes(self, name: str) -> tuple[Path, bytes]:
        path = self.place / name
        with errors_as(CheckpointError, "a file of the checkpoint cannot be read", path, ANOTHER):
            return path, read_limited(path)

    def verify(self) -> list[CheckpointError]:
        """Errors of all that is damaged; reads everything."""
        found = list[CheckpointError]()

        def read(part: Callable[[], object]) -> None:
            try:
                part()
            except CheckpointError as error:
                found.append(error)

        read(self.plan_text)
        read(self._check_index)
        for stored in self.manifest.files():
            read(partial(self._file, stored))
            for tensor in stored.tensors if stored.name in self._files else ():
                read(partial(self._file(stored).tensor, tensor.name))
            self._files.pop(stored.name, None)
        return found


def _dict(data: Any, where: str, what: str, tensors: Callable[[str], Tensor]) -> dict[str, Any]:
    """Values by key.  Raises CheckpointError where `data` has others."""
    found = decode(data, where, tensors)
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} malformed", where=where, remedy=ANOTHER)
    return found


def open_checkpoint(folder: Path) -> Contents:
    """The checkpoint that a folder stands for: itself, or the last one in it.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    place = newest(folder)
    if place is None:
        raise CheckpointError(
            "there is no complete checkpoint"
            if folder.is_dir()
            else "this is no folder"
            if folder.exists()
            else "there is no such folder",
            where=str(folder),
            remedy="give a folder that pipe.save wrote, or one checkpoint in it; paths are "
            f"relative to {Path.cwd()}",
        )
    return Contents(place)
