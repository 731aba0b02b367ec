"""Manifest: what a checkpoint holds, with a checksum of every tensor and of itself.

Strict JSON.  Nothing in it is executed or unpickled, and no path in it leads out of its folder.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from pdcompile.errors import CheckpointError, errors_as
from pdcompile.files import read_limited
from pdcompile.jsonio import decode, dumps, loads


class HoldingKind(Enum):
    """A kind of tensor: its file among those of its stage, and its key there."""

    WEIGHT = "", "{name}"  # newest value of a parameter or buffer that state dicts have
    OLDER = "-rest", "older/{number}/{name}"  # weights W_number, which a later minibatch runs on
    ACCUMULATED = "-rest", "gradient/{name}"  # sum that waits for the rest of its group
    BUFFER = "-rest", "buffer/{name}"  # one that state dicts leave out, and training writes
    REPLICA = "-replica-{number:03d}", "{name}"  # a buffer of replica `number` alone
    OPTIMIZER = "-optimizer", "{name}"  # of the optimizer's state


class Holding(NamedTuple):
    """A tensor: its kind, its name in the model, and its number where there are several."""

    kind: HoldingKind
    name: str
    number: int = 0

    @property
    def place(self) -> tuple[str, str]:
        """Ending of the file's name (``stage-000`` and this), and key in the file."""
        file, key = self.kind.value
        return file.format(number=self.number), key.format(name=self.name, number=self.number)


VERSION = 3
MANIFEST = "manifest.json"
PLAN = "plan.json"
ANOTHER = "load another checkpoint of the folder"  # the remedy where one is damaged
_FILE = re.compile(r"stage-\d{3,}([a-z0-9-]*)\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: `dtype` as torch calls it; `crc32` of its bytes in row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A safetensors file: its size, and the CRC-32 of what comes before the tensors."""

    name: str
    num_bytes: int
    header_crc32: int
    tensors: tuple[StoredTensor, ...]

    @property
    def ending(self) -> str | None:
        """Ending of its name, see `Holding.place`; None: it is not the name of a stage's file."""
        match = _FILE.fullmatch(self.name)
        return None if match is None else match[1]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A param_group: names of parameters, the values as JSON, and the class of its optimizer."""

    names: tuple[str, ...]
    values: Any
    kind: str


@dataclass(frozen=True, slots=True)
class StoredScheduler:
    """A learning-rate scheduler: its name and class, the names of parameters in each group of its
    optimizer, and its state as JSON."""

    name: str
    kind: str
    groups: tuple[tuple[str, ...], ...]
    state: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """State of one stage but for its tensors.

    Args:
        trained: the parameters that it updates.
        updates: the newest weights are W_updates.
        older: the numbers of earlier weights that a later minibatch computes on.
        waiting: minibatches whose gradients wait for the rest of their group.
        groups: of the optimizer, values as JSON.
        state: of the optimizer, by parameter, as JSON.
        schedulers: of the rank that has the stage.
    """

    stage: int
    trained: tuple[str, ...]
    updates: int
    older: tuple[int, ...]
    waiting: int
    groups: tuple[StoredGroup, ...]
    state: dict[str, Any]
    schedulers: tuple[StoredScheduler, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStage(StageState):
    """A stage in files (`Holding.place`): one of its weights, and of what else there is.

    Replicas have a file each where the buffers that training writes differ between them: those
    among the weights are their means.
    """

    files: tuple[StoredFile, ...]

    @property
    def weights(self) -> StoredFile:
        """Parameters and buffers that state dicts have, under the model's names."""
        return next(file for file in self.files if not file.ending)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint.

    Args:
        version: of this form.
        identity: a random number, in the header of every file too.
        minibatches: trained on, `evaluations`: done.
        schedule: its name, `microbatches`: of a minibatch, `ranks`: its processes.
        plan: the hash of the plan in ``plan.json``, `plan_crc32`: of that file.
        optimizer: the names of its classes; "" without one.
        aliases: further names of tied tensors: (name, first name).
        random_states: (rank, those of the generators of its process, as JSON): of rank 0, and of
            ranks where they differ.
        seed: of the random numbers that the model draws.
        loss_scale: updates before, and fields of `Scale`, of the scales that later minibatches
            take; empty without a GradScaler.
        extra_states: of modules, by their keys in a state dict, as JSON.
        checksum: CRC-32 of this text with 0 in its place.
    """

    version: int
    identity: str
    minibatches: int
    evaluations: int
    schedule: str
    microbatches: int
    ranks: int
    plan: str
    plan_crc32: int
    optimizer: str
    aliases: tuple[tuple[str, str], ...]
    stages: tuple[StoredStage, ...]
    random_states: tuple[tuple[int, Any], ...]
    seed: int
    loss_scale: tuple[tuple[int, float, int, float, float, int], ...]
    extra_states: dict[str, Any]
    checksum: int = 0

    def index(self) -> bytes:
        """The index of the files of weights, as `weights=` and transformers read it."""
        files = [stage.weights for stage in self.stages]
        names = {one.name: file.name for file in files for one in file.tensors}
        return json.dumps({"metadata": {}, "weight_map": names}, indent=2).encode()

    def to_text(self) -> str:
        """The file's text, with its checksum."""
        checksum = zlib.crc32(dumps(replace(self, checksum=0)).encode())
        return dumps(replace(self, checksum=checksum))

    def files(self) -> Iterator[StoredFile]:
        """All safetensors files, stage by stage."""
        for stage in self.stages:
            yield from stage.files

    @property
    def num_bytes(self) -> int:
        """Size of all safetensors files."""
        return sum(file.num_bytes for file in self.files())


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, checked by itself; its files are not looked at.

    Raises:
        CheckpointError: it is missing, damaged, of another version, or contradicts itself.
    """
    path = checkpoint / MANIFEST
    where = str(path)
    with errors_as(
        CheckpointError,
        "there is no readable manifest",
        where,
        "give a folder that pipe.save wrote, or one checkpoint in it",
    ):
        data = read_limited(path)
    found = loads(data, where=where, error=CheckpointError, remedy=ANOTHER)
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"the manifest has version {str(version)[:20]}, and this pdcompile reads {VERSION}",
            where=f"{where}: version",
            remedy="load it with the pdcompile that wrote it",
        )
    manifest = decode(Manifest, found, where=where, error=CheckpointError)
    if manifest.to_text().encode() != data:
        raise CheckpointError(
            "the manifest was changed after it was written: its checksum does not fit",
            where=where,
            remedy="load another checkpoint of the folder; a manifest cannot be edited",
        )
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    def wrong(message: str, place: str) -> CheckpointError:
        return CheckpointError(message, where=f"{where}: {place}", remedy=ANOTHER)

    for n, stage in enumerate(manifest.stages):
        place = f"stages[{n}]"
        if stage.stage != n:
            raise wrong(f"stage {stage.stage} is in the place of stage {n}", place)
        for file in stage.files:
            if file.ending is None:
                raise wrong(f"{file.name!r} is not the name of a safetensors file in it", place)
        if "" not in [file.ending for file in stage.files]:
            raise wrong("there is no file of its weights", place)
    weights = {one.name for stage in manifest.stages for one in stage.weights.tensors}
    for alias, first in manifest.aliases:
        if alias in weights or first not in weights:
            raise wrong(f"{alias} is no further name of {first}", "aliases")
