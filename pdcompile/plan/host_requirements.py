"""Requirements of a plan on processes and memory of the hosts, checked before there is a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.cluster import Device
from pdcompile.errors import LaunchError, PdcompileError, PlanError
from pdcompile.plan.schema import Plan
from pdcompile.units import format_bytes


def lacks(
    plan: Plan,
    *,
    processes: int | None,
    on_this_host: int | None = None,
    memory_bytes: int | None = None,
    gpus: int | None = None,
) -> Iterator[PdcompileError]:
    """Errors for all that is missing.

    Args:
        processes: that torchrun started; None: one, in which all ranks run in turn.
        on_this_host: how many of them; None: all.
        memory_bytes: of this host; None: not known, as the next.
        gpus: of this host.
    """
    if processes not in (None, plan.num_processes):
        yield LaunchError(
            f"the plan is for {plan.num_processes} processes, and there are {processes}",
            where="plan",
            remedy=f"launch with torchrun --nproc-per-node={plan.num_processes}, or plan again",
        )
    devices, count = plan.machines.devices, plan.num_columns
    if processes is not None and count > plan.num_ranks:
        idle = set(range(count)) - {rank for stage in plan.ranks for rank in stage}
        yield LaunchError(
            f"the plan leaves idle the ranks {', '.join(map(str, sorted(idle)))} before its last "
            "one, and processes are numbered through",
            where="plan: stages",
            remedy="describe a cluster of the devices that the plan uses, and plan for that; one "
            "process runs this plan as it is",
        )
    every = [rank for rank, parts in enumerate(plan.parts_of_rank) for _ in range(parts)]
    here = every[: on_this_host or processes]
    yield from lacks_devices(
        [devices[rank] for rank in here],
        alone=processes is None, gpus=gpus, where="plan: cluster",
    )  # fmt: skip
    hosted = [rank for rank in here if plan.ledgers and devices[rank].on_host]
    held = [plan.ledgers[rank].total_bytes for rank in hosted]
    if memory_bytes is not None and sum(held) > memory_bytes:
        yield PlanError(
            f"the {len(held)} ranks on this host need {format_bytes(sum(held))} by the plan's "
            f"forecast, and it has {format_bytes(memory_bytes)}",
            where="plan: forecast",
            remedy="fewer ranks a host; or plan again with --memory "
            f"{memory_bytes // len(held) // 10**6}MB"
            + ("" if all(one.recompute for one in plan.stages) else ", and --recompute auto"),
        )


def lacks_devices(
    devices: Sequence[Device], *, alone: bool, gpus: int | None, where: str = "cluster"
) -> Iterator[PdcompileError]:
    """Errors for devices of a cluster that this host lacks: it needs a GPU for each, or one that
    all of them share, where one process is all ranks (`alone`).

    Args:
        gpus: of this host; None: not known.
    """
    others = [device.kind for device in devices if not device.on_host]
    needed = min(len(others), 1) if alone else len(others)
    if gpus is not None and gpus < needed:
        yield LaunchError(
            f"the plan is for {', '.join(sorted({*others}))} devices, {len(others)} of them on "
            f"this host, and torch finds {gpus} GPUs",
            where=where,
            remedy="run it on such machines, or plan again for what is here: --cluster auto; "
            "`pdcompile plan`, `simulate` and `dump` work for any kind",
        )
    if alone and 0 < len(others) < len(devices):
        kinds = sorted({device.kind for device in devices})
        yield LaunchError(
            f"one process would have stages on {' and '.join(kinds)} devices",
            where=where,
            remedy="start one process a rank, with torchrun; or one kind for all devices: "
            f"Cluster.local({len(devices)}, kind={others[0]!r})",
        )
