"""Choices: options resolved against the machines and the minibatch, before any pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pdcompile.autocast import autocast_text
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, LaunchError
from pdcompile.options import Options
from pdcompile.units import parse_bytes

FLUSH_SCHEDULES = ("gpipe", "1f1b")
STALE_SCHEDULES = ("2bw",)
MICROBATCHES_PER_STAGE = 4  # bubble (N−1)/(m+N−1) at most one fifth with m = 4·N


@dataclass(frozen=True, slots=True)
class Choices:
    """What the passes need to know, with nothing left open.

    `num_ranks` is the number of stages for now: one stage a rank.
    """

    cluster: Cluster
    num_stages: int
    schedule: str
    num_microbatches: int
    microbatch_size: int  # the largest one: costs are of this size
    batch_size: int
    loss_reduction: str
    max_grad_norm: float | None
    seed: int
    objective: Literal["bottleneck", "flush"]
    autocast: str | None = None  # "cpu:bfloat16"


def choose(
    options: Options,
    *,
    batch_size: int,
    splits: bool,
    num_ranks: int | None,
    searching: bool = False,
    device: str = "cpu",
) -> Choices:
    """Resolve the options.

    Args:
        batch_size: samples in the global minibatch.
        splits: False when nothing has a batch dimension (one microbatch).
        num_ranks: processes under torchrun, None in one process.
        searching: the planner decides how many devices a stage has; there may be fewer stages.
        device: kind of the device that the model is on.

    Raises:
        ConfigError: an option does not fit the minibatch or the machines.
        LaunchError: the number of processes is not the number of stages.
    """
    schedule = _schedule(options)
    stages = _num_stages(options, num_ranks)
    cluster = _cluster(options.cluster, stages, in_process=num_ranks is None)
    cluster = _limited(cluster, options.memory)
    if len(cluster.devices) < stages or (len(cluster.devices) > stages and not searching):
        raise ConfigError(
            f"{stages} stages on a cluster of {len(cluster.devices)} devices",
            remedy=f"give stages={len(cluster.devices)} or a cluster of {stages} devices: "
            "one stage a device",
        )
    microbatches = _num_microbatches(options.microbatches, stages, batch_size, splits)
    return Choices(
        cluster=cluster,
        num_stages=stages,
        schedule=schedule,
        num_microbatches=microbatches,
        microbatch_size=-(-batch_size // microbatches),
        batch_size=batch_size,
        loss_reduction=options.loss_reduction
        if isinstance(options.loss_reduction, str)
        else "callable",
        max_grad_norm=options.max_grad_norm,
        seed=options.seed,
        objective="flush" if schedule in FLUSH_SCHEDULES else "bottleneck",
        autocast=autocast_text(options.autocast, device),
    )


def check_model(model: Any) -> None:
    """Refuse what is no model, before anything asks it for parameters.  Raises ConfigError."""
    from torch import nn

    if not isinstance(model, nn.Module):
        shown = f"the class {model.__name__}" if isinstance(model, type) else repr(model)[:60]
        raise ConfigError(
            f"the model must be a torch.nn.Module, got {shown}",
            remedy="pass an instance: pdcompile.compile(MyModel(), ...)",
        )


def check_options(options: Options) -> None:
    """Refuse what is wrong whatever the model and the minibatch are.  Raises ConfigError."""
    _callable("loss_fn", options.loss_fn, "(output, target) -> scalar, or None")
    _callable("optimizer", options.optimizer, "partial(torch.optim.AdamW, lr=3e-4), or None")
    _number("seed", options.seed, integer=True, least=0)
    if options.seed is None:
        raise ConfigError("seed=None names no seed", remedy="a number; 0 is the default")
    _number("time_limit", options.time_limit, least=0)
    _number("max_grad_norm", options.max_grad_norm)
    _one_of("refine", options.refine, ("auto", True, False))
    _one_of("progress", options.progress, ("auto", True, False))
    _one_of("verify", options.verify, ("auto", "full", "blocks", "off"))
    _one_of("outputs", options.outputs, ("none", "last", "all"))
    _one_of("max_staleness", options.max_staleness, (0, 1, "any"))
    if not callable(options.loss_reduction):
        _one_of("loss_reduction", options.loss_reduction, ("mean", "sum"))
    for name in ("keep_model", "allow_edited"):
        _one_of(name, getattr(options, name), (False, True))
    if not isinstance(options.constraints, Sequence) or isinstance(options.constraints, str):
        raise ConfigError(
            f"constraints={options.constraints!r} is not a list",
            remedy="a list of Pin, Together, Apart, CutBefore, Forbid and MaxStages; () for none",
        )
    if options.allow_edited and options.sources is None:
        raise ConfigError(
            "allow_edited=True without sources= would have no effect",
            remedy="give sources=, the folder that was edited",
        )
    clip = options.max_grad_norm
    if clip is not None and not 0 < clip < float("inf"):
        raise ConfigError(
            f"max_grad_norm={clip!r} is not a positive, finite number",
            remedy="for example 1.0; None for no clipping",
        )
    if options.schedule == "stash" and clip is not None:
        raise ConfigError(
            "max_grad_norm needs the gradients of all stages at one time, which schedule "
            "'stash' never has",
            remedy="use schedule='2bw', or clip per stage in the optimizer",
        )
    _group(options.group)
    autocast_text(options.autocast)
    if options.grad_scaler is not None:
        raise ConfigError(
            f"grad_scaler={options.grad_scaler!r} is not available yet",
            remedy="leave it out: autocast='bfloat16' needs none",
        )
    if options.memory is not None:
        parse_bytes(options.memory, what="memory")
    _schedule(options)


def _callable(name: str, given: Any, wanted: str) -> None:
    if given is not None and not callable(given):
        shown = repr(given) if len(repr(given)) < 60 else f"a {type(given).__name__}"
        raise ConfigError(f"{name} is {shown}, which cannot be called", remedy=f"give {wanted}")


def _group(given: Any) -> None:
    if given is None:
        return
    import torch.distributed as dist

    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "this process is not a member of group", remedy="compile on the group's ranks only"
        )
    if not isinstance(given, dist.ProcessGroup):
        raise ConfigError(
            f"group={given!r} is not a process group", remedy="torch.distributed.new_group([0, 1])"
        )


def _number(name: str, given: Any, *, integer: bool = False, least: float | None = None) -> None:
    if given is None:
        return
    kinds = (int,) if integer else (int, float)
    if isinstance(given, bool) or not isinstance(given, kinds):
        raise ConfigError(f"{name}={given!r} is not a number", remedy=f"give {name} a number")
    if least is not None and not given >= least:
        raise ConfigError(f"{name}={given!r} is below {least}", remedy=f"{least} or more")


def _one_of(name: str, given: Any, known: tuple[Any, ...]) -> None:
    if not any(given is one or (type(given) is type(one) and given == one) for one in known):
        raise ConfigError(
            f"{name}={given!r} is not known", remedy=f"one of {', '.join(map(repr, known))}"
        )


def _schedule(options: Options) -> str:
    if options.schedule == "auto":
        return "2bw" if options.max_staleness in (1, "any") else "1f1b"
    if options.schedule not in FLUSH_SCHEDULES + STALE_SCHEDULES:
        known = ", ".join(repr(name) for name in (*FLUSH_SCHEDULES, *STALE_SCHEDULES, "auto"))
        raise ConfigError(
            f"schedule={options.schedule!r} is not available", remedy=f"one of {known}"
        )
    return options.schedule


def _num_stages(options: Options, num_ranks: int | None) -> int:
    stages = options.stages
    if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int)):
        raise ConfigError(f"stages={stages!r} is not a number", remedy="for example stages=4")
    if stages is not None and stages < 1:
        raise ConfigError(f"stages={stages} is below 1", remedy="1 or more")
    if num_ranks is not None:
        if stages is not None and stages != num_ranks:
            raise LaunchError(
                f"{stages} stages, but WORLD_SIZE is {num_ranks}",
                remedy=f"launch with torchrun --nproc-per-node={stages}, or leave stages out",
            )
        return num_ranks
    if stages is not None:
        return stages
    if isinstance(options.cluster, Cluster):
        return len(options.cluster.devices)
    if options.cluster != "auto":
        return len(_cluster(options.cluster, 1, in_process=True).devices)
    return 1


def _cluster(given: Any, stages: int, *, in_process: bool) -> Cluster:
    if isinstance(given, Cluster):
        return given
    if given == "auto":
        return Cluster.local(stages) if in_process else _auto(stages)
    if isinstance(given, str | Path):
        text = str(given)
        return Cluster.load(text) if text.endswith(".toml") else Cluster.parse(text)
    raise ConfigError(
        f"cluster={given!r} is not a cluster",
        remedy="'auto', Cluster.local(4), '2x4' (hosts x devices), or the path of a cluster.toml",
    )


def _auto(num_ranks: int) -> Cluster:
    """The cluster that torchrun started; a group of some of its ranks counts as one host."""
    cluster = Cluster.auto()
    if len(cluster.devices) == num_ranks:
        return cluster
    return Cluster.auto({"WORLD_SIZE": str(num_ranks)})


def _num_microbatches(given: Any, stages: int, batch_size: int, splits: bool) -> int:
    if not splits:
        return 1
    if given == "auto":
        wanted = min(batch_size, MICROBATCHES_PER_STAGE * stages if stages > 1 else 1)
        divisor = max(m for m in range(1, wanted + 1) if batch_size % m == 0)
        return divisor if 2 * divisor > wanted else wanted  # uneven is exact, only less regular
    if isinstance(given, bool) or not isinstance(given, int):
        raise ConfigError(
            f"microbatches={given!r} is neither a number nor 'auto'", remedy="for example 8"
        )
    if given < 1:
        raise ConfigError(f"microbatches={given} is below 1", remedy="1 or more")
    if given > batch_size:
        raise ConfigError(
            f"{given} microbatches of a minibatch of {batch_size} samples",
            remedy=f"microbatches={batch_size} or fewer, or a larger minibatch",
        )
    return given


def _limited(cluster: Cluster, memory: int | str | None) -> Cluster:
    """The cluster with the user's limit on every device: plans and reports then show it."""
    if memory is None:
        return cluster
    limit = parse_bytes(memory, what="memory")
    devices = tuple(
        replace(device, memory_bytes=min(limit, device.memory_bytes or limit))
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)
