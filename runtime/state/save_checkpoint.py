"""Saving: every rank writes its own stages, rank 0 makes a checkpoint of them when all are done."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pdcompile.checkpoint import folder as checkpoints
from pdcompile.checkpoint.extra_states import encoded_extra_states
from pdcompile.checkpoint.generators import generator_states
from pdcompile.checkpoint.manifest import VERSION, Manifest, StoredFile, StoredStage
from pdcompile.checkpoint.tensor_file import TensorFile, unwritten
from pdcompile.errors import CheckpointError, PdcompileError
from pdcompile.jsonio import decode, dumps, encode
from pdcompile.position import Position
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.accumulated import held
from pdcompile.runtime.state.checkpoint_parts import Apart, write_replicas, write_stages
from pdcompile.runtime.state.exchange import Exchange
from pdcompile.schedule.registry import name_of
from pdcompile.warn import warn


class Saved(NamedTuple):
    """What became of a save, on every rank: its place, or why there is none."""

    place: Path | None
    error: PdcompileError | None


class Asked(NamedTuple):
    """How many of the `own` checkpoints of this training stay, whether what was written is read
    back, and schedulers by name."""

    keep: int | None
    verify: bool
    schedulers: Mapping[str, Any]
    own: checkpoints.OwnCheckpoints


def save(
    session: Session,
    exchange: Exchange,
    folder: Path,
    position: Position,
    asked: Asked,
    apart: Apart,
) -> Saved:
    """Write a checkpoint; nothing is in flight, and all ranks are in this call.

    `apart`: what replicas here have of their own.
    """
    first = 0 in session.ranks
    generators = generator_states()
    opened = json.loads(exchange.announce(_opened(folder, generators) if first else ""))
    if "error" in opened:
        return Saved(None, error_of(opened))
    written, identity = folder / opened["name"], opened["identity"]
    failed: PdcompileError | None = None
    told: dict[str, Any] = {}
    try:
        if not written.is_dir():
            raise CheckpointError(
                "this rank does not see the folder that rank 0 has made",
                where=str(written),
                remedy="give every rank the path of one folder that all hosts share",
            )
        waiting = held(session, position.minibatches)
        stages = write_stages(
            session, written, identity, position.minibatches, waiting, asked.schedulers
        )
        replicas = write_replicas(session, written, identity, apart)
        if asked.verify:
            files = [file for stage in stages for file in stage.files]
            _read_back(written, [*files, *(file for _, _, file in replicas)], identity)
        told["stages"] = [encode(stage) for stage in stages]
        told["replicas"] = encode(replicas)
        if _checksum(generators) != opened["generators"]:
            told["generators"] = generators
    except (PdcompileError, OSError) as error:
        failed = error if isinstance(error, PdcompileError) else unwritten(written, error)
        told = told_of(failed)
    texts = exchange.gather(json.dumps(told))
    verdict = ""
    if first:
        parts = [json.loads(text) for text in texts]
        verdict = _closed(session, written, identity, position, parts, asked.schedulers)
    closed = json.loads(exchange.announce(verdict))
    if "error" in closed:
        return Saved(None, failed or error_of(closed))
    place = folder / closed["name"]
    if first:
        _keep(place, asked.keep, asked.own)
    return Saved(place, None)


def _keep(place: Path, keep: int | None, own: checkpoints.OwnCheckpoints) -> None:
    own.made(place)
    try:
        others = own.others(place.parent)
        if keep is not None:
            checkpoints.keep_last(place.parent, keep, others)
    except OSError as error:
        warn(f"old checkpoints cannot be found or removed: {error}")


def _opened(folder: Path, generators: Any) -> str:
    try:
        made = checkpoints.begin(folder)
    except OSError as error:
        return json.dumps(told_of(unwritten(folder, error)))
    told = {"name": made.name, "identity": secrets.token_hex(16)}
    return json.dumps({**told, "generators": _checksum(generators)})


def _checksum(generators: Any) -> int:
    return zlib.crc32(dumps(generators).encode())


def _closed(
    session: Session,
    written: Path,
    identity: str,
    position: Position,
    parts: list[dict[str, Any]],
    schedulers: Mapping[str, Any],
) -> str:
    """Rank 0: make a checkpoint of what all have written; the verdict for all."""
    failed = [(rank, part) for rank, part in enumerate(parts) if "error" in part]
    try:
        if failed:
            rank, part = failed[0]
            error = error_of(part)
            if session.world is not None:
                error.message = f"rank {rank} could not write its part: {error.message}"
            raise error
        where = str(written)
        told = [tuple(one) for part in parts for one in part["replicas"]]
        replicas = sorted(told, key=lambda one: one[:2])
        stages = [
            decode(
                StoredStage,
                one | {"replicas": [file for stage, _, file in replicas if stage == one["stage"]]},
                where=where,
                error=CheckpointError,
            )
            for part in parts
            for one in part["stages"]
        ]
        manifest = _manifest(session, identity, position, stages, schedulers)
        others = ((rank, p["generators"]) for rank, p in enumerate(parts) if "generators" in p)
        manifest = replace(manifest, random_states=tuple(others))
        place = checkpoints.finish(written, manifest, session.plan.to_json())
    except (PdcompileError, OSError) as error:
        checkpoints.discard(written)
        ours = error if isinstance(error, PdcompileError) else unwritten(written, error)
        return json.dumps(told_of(ours))
    return json.dumps({"name": place.name})


def _manifest(
    session: Session,
    identity: str,
    position: Position,
    stages: list[StoredStage],
    schedulers: Mapping[str, Any],
) -> Manifest:
    plan, names = session.plan, session.state.names
    return Manifest(
        version=VERSION,
        identity=identity,
        minibatches=position.minibatches,
        evaluations=position.evaluations,
        schedule=name_of(plan.training.schedule),
        microbatches=plan.training.num_microbatches,
        ranks=plan.num_ranks,
        plan=plan.hash(),
        plan_crc32=zlib.crc32(plan.to_json().encode()),
        optimizer=" and ".join(sorted({one.kind for stage in stages for one in stage.groups})),
        aliases=tuple((one, fqn) for fqn, keys in names.items() for one in keys if one != fqn),
        stages=tuple(sorted(stages, key=lambda stage: stage.stage)),
        schedulers={one.name: one.state for stage in stages[:1] for one in stage.schedulers},
        scheduler_types=tuple((name, type(one).__name__) for name, one in schedulers.items()),
        random_state=generator_states(),
        seed=plan.training.seed,
        loss_scale=() if session.loss_scale is None else session.loss_scale.saved(),
        extra_states=encoded_extra_states(session.model),
    )


def _read_back(folder: Path, files: list[StoredFile], identity: str) -> None:
    """Raise CheckpointError where a file is not what was written."""
    for stored in files:
        file = TensorFile(folder, stored, identity)
        for tensor in stored.tensors:
            file.tensor(tensor.name)
        file.close()


def told_of(error: PdcompileError) -> dict[str, Any]:
    return {"error": [error.message, error.where, error.remedy]}


def error_of(told: Mapping[str, Any]) -> CheckpointError:
    message, where, remedy = told["error"]
    return CheckpointError(message, where=where, remedy=remedy)
