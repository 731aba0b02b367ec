"""Saving: every rank writes its own stages, rank 0 makes a checkpoint of them when all are done."""

from __future__ import annotations

import secrets
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pdcompile.checkpoint import folder as checkpoints
from pdcompile.checkpoint.extra_states import encoded_extra_states, generator_states
from pdcompile.checkpoint.folder import unwritten, write_tensors
from pdcompile.checkpoint.manifest import (
    VERSION,
    HoldingKind,
    Manifest,
    StageState,
    StoredFile,
    StoredStage,
)
from pdcompile.errors import CheckpointError
from pdcompile.jsonio import decode, encode
from pdcompile.position import Position
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.exchange import agreed, everywhere, of_first
from pdcompile.runtime.state.holdings import Row, holdings, stage_states, whole_rows
from pdcompile.schedule.registry import name_of

Written = list[tuple[int, StoredFile]]  # with its stage


def save(
    session: Session,
    folder: Path,
    position: Position,
    schedulers: Mapping[str, Any],
    replicas: Sequence[Row],
) -> Path:
    """Write a checkpoint; nothing is in flight, and all ranks are in this call.

    `replicas`: the buffers that replicas here have of their own.

    Raises:
        Refused: it cannot be written, on every rank.
    """
    generators = generator_states()

    def begin() -> list[Any]:
        with unwritten(folder):
            made = checkpoints.begin(folder)
        return [made.name, secrets.token_hex(16)]

    name, identity = of_first(session, begin)
    written = folder / name

    def part() -> dict[str, Any]:
        if not all(everywhere(session, written.is_dir())):
            raise CheckpointError(
                "this rank does not see the folder that rank 0 has made",
                where=str(written),
                remedy="give every rank the path of one folder that all hosts share",
            )
        rows = [*holdings(session, position.minibatches)]
        rows = [row for row in rows if row.holding.kind is not HoldingKind.REPLICA]
        states = stage_states(session, position.minibatches, schedulers)
        whole = whole_rows(session, [*rows, *replicas])
        with unwritten(written):
            files = write_stages(written, identity, whole, states, partial(_replica, session))
        stages = [encode(state) for state, _ in states]
        return {"files": encode(files), "stages": stages, "generators": generators}

    undo = partial(checkpoints.discard, written)
    parts = agreed(session, part, "could not write its part", undo)

    def close() -> str:
        manifest = _manifest(session, identity, position, parts, str(written))
        with unwritten(written):
            return checkpoints.finish(written, manifest, session.plan.to_json()).name

    place: Path = folder / of_first(session, close, undo)
    return place


def write_stages(
    folder: Path,
    identity: str,
    rows: Iterable[Row],
    states: Iterable[tuple[StageState, Mapping[str, Tensor]]],
    replica_of: Callable[[int], int],
) -> Written:
    """Write the files of what this process is to save, as these replicas of its stages.

    Raises:
        CheckpointError: a file cannot be written.
    """
    files = defaultdict[tuple[int, str], dict[str, Tensor]](dict)
    for state, of_optimizer in states:
        if not (replica := replica_of(state.stage)):
            files[state.stage, ""] = {}  # there in any case
        if of_optimizer:
            ending = HoldingKind.OPTIMIZER.value[0] + f"-{replica:03d}" * (replica > 0)
            files[state.stage, ending] = dict(of_optimizer)
    for row in rows:
        ending, key = row.holding.place
        files[row.worker.stage, ending][key] = row.tensor
    return [
        (stage, write_tensors(folder / name, tensors, identity))
        for (stage, ending), tensors in sorted(files.items(), key=lambda one: one[0])
        for name in [f"stage-{stage:03d}{ending}.safetensors"]
    ]


def _replica(session: Session, stage: int) -> int:
    """Number of this process among those of a stage, its parts side by side; the first one of
    several."""
    ranks, beside = session.spec.ranks[stage], session.beside
    replica = min(ranks.index(rank) for rank in session.ranks if rank in ranks)
    return replica if beside is None else replica * beside.count + beside.part


def _manifest(
    session: Session,
    identity: str,
    position: Position,
    parts: Sequence[Mapping[str, Any]],
    where: str,
) -> Manifest:
    """The manifest of what all processes have written."""
    plan, names, generators = session.plan, session.state.names, parts[0]["generators"]
    files: dict[int, list[Any]] = {}
    for stage, file in (one for part in parts for one in part["files"]):
        files.setdefault(stage, []).append(file)
    told: dict[int, Any] = {}
    for one in (one for part in parts for one in part["stages"]):  # of homes more than one a stage
        known = told.setdefault(one["stage"], one)
        first, other = (known, one) if known["groups"] or known["trained"] else (one, known)
        told[one["stage"]] = {**first, "state": {**first["state"], **other["state"]}}
    stages = [
        decode(StoredStage, {**one, "files": files[n]}, where=where, error=CheckpointError)
        for n, one in sorted(told.items())
    ]
    return Manifest(
        version=VERSION,
        identity=identity,
        minibatches=position.minibatches,
        evaluations=position.evaluations,
        schedule=name_of(plan.training.schedule),
        microbatches=plan.training.num_microbatches,
        ranks=plan.num_processes,
        plan=plan.hash(),
        plan_crc32=zlib.crc32(plan.to_json().encode()),
        optimizer=" and ".join(sorted({one.kind for stage in stages for one in stage.groups})),
        aliases=tuple((one, fqn) for fqn, keys in names.items() for one in keys if one != fqn),
        stages=tuple(stages),
        seed=plan.training.seed,
        loss_scale=() if session.loss_scale is None else session.loss_scale.saved(),
        extra_states=encoded_extra_states(session.model),
        random_states=tuple(
            (process, part["generators"])
            for process, part in enumerate(parts)
            if process == 0 or part["generators"] != generators
        ),
    )
