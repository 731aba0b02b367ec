"""What this process writes into a checkpoint: the parts of the stages whose first replica it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pdcompile.checkpoint.manifest import StoredFile, StoredGroup, StoredScheduler, StoredStage
from pdcompile.checkpoint.named_optimizer import (
    NamedGroup,
    named_groups,
    named_state,
    names_of,
    settings,
)
from pdcompile.checkpoint.plain_values import Encoder
from pdcompile.checkpoint.scheduler_states import scheduler_groups
from pdcompile.checkpoint.tensor_file import write_tensors
from pdcompile.errors import CheckpointError
from pdcompile.position import Accumulated
from pdcompile.runtime.interpreter import Worker
from pdcompile.runtime.session import Session


def owners(session: Session) -> dict[str, int]:
    """The first stage that holds each tensor of the model."""
    found: dict[str, int] = {}
    for stage, one in enumerate(session.compiled.interfaces):
        for fqn in (*one.parameters, *one.buffers, *one.constants):
            found.setdefault(fqn, stage)
    return found


def writers(session: Session) -> Iterator[Worker]:
    """The first replicas of stages that are in this process."""
    for worker in session.workers:
        if worker.transport.rank == session.spec.ranks[worker.stage][0]:
            yield worker


def hidden(session: Session, stage: int) -> list[str]:
    """Tensors of a stage that training writes, and that state dicts leave out."""
    kept = session.state.names
    return sorted(fqn for fqn in session.compiled.written_buffers(stage) if fqn not in kept)


def older_versions(session: Session, stage: int, minibatches: int) -> range:
    """The numbers of the weights, but for the newest, that later minibatches run on."""
    newest = minibatches // session.spec.group(stage)
    return range(max(newest - session.spec.lag(stage), 0), newest)


Apart = list[tuple[Worker, dict[str, Tensor]]]


def replicas_apart(session: Session) -> Apart:
    """Copies of the buffers that replicas in this process write, each its own, where they part."""
    return [
        (worker, {f: t.clone() for f, t in written_buffers(session, worker).items()})
        for worker in (session.workers if session.replicas_apart else ())
        if worker.replicas is not None
    ]


def part_again(session: Session, apart: Apart) -> None:
    """Give replicas their own buffers again, after somebody has read what they have together."""
    for worker, own in apart:
        for fqn, tensor in written_buffers(session, worker).items():
            tensor.copy_(own[fqn])
    session.replicas_apart = bool(apart) or session.replicas_apart


def written_buffers(session: Session, worker: Worker) -> dict[str, Tensor]:
    """The buffers that training writes on a stage, as this replica has them."""
    return worker.weights.buffers(session.compiled.written_buffers(worker.stage))


def write_replicas(
    session: Session, folder: Path, identity: str, apart: Apart
) -> list[tuple[int, int, StoredFile]]:
    """Write the own buffers of replicas in this process: stage, replica and file of each.

    Raises CheckpointError.
    """
    found = []
    for worker, own in apart:
        index = session.spec.ranks[worker.stage].index(worker.transport.rank)
        path = folder / f"stage-{worker.stage:03d}-replica-{index:03d}.safetensors"
        if own:
            found.append((worker.stage, index, write_tensors(path, own, identity)))
    return found


def write_stages(
    session: Session,
    folder: Path,
    identity: str,
    minibatches: int,
    waiting: Mapping[str, Accumulated],
    schedulers: Mapping[str, Any],
) -> list[StoredStage]:
    """Write the files of all stages of which this process is the first replica.

    Args:
        waiting: gradients that wait for the rest of their group.
        schedulers: of this process, by name.

    Raises:
        CheckpointError: a file cannot be written, or a value has no place in one.
        InputError: the optimizer keeps something that belongs to no parameter.
    """
    owner, optimizer = owners(session), session.optimizer
    names = names_of(all_parameters(session))
    state = {} if optimizer is None else named_state(optimizer, names)
    told = {
        name: ([held for _, held in scheduler_groups(one, optimizer, names)], _state_of(name, one))
        for name, one in schedulers.items()
    }
    found = []
    for worker in writers(session):
        stage, label = worker.stage, f"stage-{worker.stage:03d}"
        own = [fqn for fqn in session.state.infos if owner.get(fqn, 0) == stage]
        tensors = session.state.tensors
        weights = {fqn: tensors[fqn] for fqn in own if fqn in session.state.names}
        rest = _rest(session, worker, minibatches, waiting)
        encoder, groups = Encoder(), tuple[StoredGroup, ...]()
        if optimizer is not None:
            values = session.updater.values_of(stage)
            groups = tuple(
                StoredGroup(
                    tuple(name for name in one.names if owner.get(name) == stage),
                    encoder.encode(settings(values[n]), f"groups/{n}"),
                    one.kind,
                )
                for n, one in enumerate(named_groups(optimizer, names))
            )
        kept = {f: encoder.encode(dict(one), f) for f, one in state.items() if owner[f] == stage}

        def written(kind: str, those: Mapping[str, Tensor], label: str = label) -> Any:
            path = folder / f"{label}{kind}.safetensors"
            return write_tensors(path, those, identity) if those or not kind else None

        found.append(
            StoredStage(
                stage=stage,
                weights=written("", weights),
                optimizer=written("-optimizer", encoder.tensors),
                rest=written("-rest", rest),
                trained=worker.weights.owned,
                updates=minibatches // session.spec.group(stage),
                older=tuple(older_versions(session, stage, minibatches)),
                waiting=max((waiting[f].minibatches for f in own if f in waiting), default=0),
                groups=groups,
                state=kept,
                schedulers=tuple(
                    StoredScheduler(
                        name, tuple(tuple(f for f in n if owner.get(f) == stage) for n in held), its
                    )
                    for name, (held, its) in told.items()
                ),
            )
        )
    return found


def _state_of(name: str, scheduler: Any) -> Any:
    """JSON of a scheduler's state.

    Raises:
        CheckpointError: it gives none, or one that no file without code can hold.
    """
    try:
        state = scheduler.state_dict()
    except Exception as error:  # the user's
        raise CheckpointError(
            f"scheduler {name} ({type(scheduler).__name__}) gives no state: "
            f"{type(error).__name__}: {error}",
            where="schedulers",
            remedy="hand over schedulers whose state_dict() works, or save it yourself",
        ) from error
    return Encoder(inline=True).encode(state, f"schedulers/{name}")


def _rest(
    session: Session, worker: Worker, minibatches: int, waiting: Mapping[str, Accumulated]
) -> dict[str, Tensor]:
    owned = worker.weights.owned
    older = {
        f"older/{version}/{fqn}": worker.weights.parameter(version, fqn)
        for version in older_versions(session, worker.stage, minibatches)
        for fqn in owned
    }
    gradients = {
        f"gradient/{fqn}": waiting[fqn].gradient
        for fqn in owned
        if fqn in waiting and waiting[fqn].gradient is not None
    }
    buffers = {f"buffer/{f}": session.state.tensors[f] for f in hidden(session, worker.stage)}
    return {**older, **gradients, **buffers}  # type: ignore[dict-item]


def made_groups(session: Session) -> list[NamedGroup]:
    """The groups of this process's optimizer as the user's callable has made them."""
    if session.optimizer is None:
        return []
    present = named_groups(session.optimizer, names_of(all_parameters(session)))
    return [g._replace(values=v) for g, v in zip(present, session.made_groups, strict=False)]


def all_parameters(session: Session) -> dict[str, Tensor]:
    """All of the model's parameters, frozen ones too."""
    infos = session.state.infos
    return {fqn: session.state.tensors[fqn] for fqn in infos if infos[fqn].kind == "parameter"}
