"""Can a plan run on the processes and the memory that are here?  Known before there is a model."""

from __future__ import annotations

from collections.abc import Iterator

from pdcompile.cluster import Cluster
from pdcompile.errors import LaunchError, PdcompileError, PlanError
from pdcompile.plan.schema import Plan, ranks_of
from pdcompile.units import format_bytes


def lacks(
    plan: Plan,
    *,
    processes: int | None,
    on_this_host: int | None = None,
    memory_bytes: int | None = None,
    gpus: int | None = None,
    where: str = "plan",
) -> Iterator[PdcompileError]:
    """What is missing, each as the error that it would be.

    Args:
        processes: that torchrun started; None: one, in which all ranks run in turn.
        on_this_host: how many of them; None: all.
        memory_bytes: of this host; None: not known, as the next.
        gpus: of this host.
    """
    if processes not in (None, plan.num_ranks):
        yield LaunchError(
            f"the plan is for {plan.num_ranks} processes, and there are {processes}",
            where=where,
            remedy=f"launch with torchrun --nproc-per-node={plan.num_ranks}, or plan again",
        )
    devices = Cluster.from_toml(plan.cluster, where=f"{where}: cluster").devices
    count = plan.num_columns
    if processes is not None and count > plan.num_ranks:
        idle = set(range(count)) - {rank for stage in ranks_of(plan.stages) for rank in stage}
        yield LaunchError(
            f"the plan leaves idle the ranks {', '.join(map(str, sorted(idle)))} before its last "
            "one, and processes are numbered through",
            where=f"{where}: stages",
            remedy="describe a cluster of the devices that the plan uses, and plan for that; one "
            "process runs this plan as it is",
        )
    here = range(count if processes is None else min(on_this_host or processes, count))
    others = [devices[rank].kind for rank in here if devices[rank].kind != "cpu"]
    needed = min(len(others), 1) if processes is None else len(others)
    if gpus is not None and gpus < needed:
        yield LaunchError(
            f"the plan is for {', '.join(sorted({*others}))} devices, {len(others)} of them on "
            f"this host, and torch finds {gpus} GPUs",
            where=f"{where}: cluster",
            remedy="run it on such machines, or plan again for what is here: --cluster auto",
        )
    ledgers = () if plan.forecast is None else plan.forecast.ledgers
    held = [
        ledger.total_bytes
        for rank, ledger in enumerate(ledgers)
        if rank in here and devices[rank].kind == "cpu"
    ]
    if memory_bytes is not None and sum(held) > memory_bytes:
        yield PlanError(
            f"the {len(held)} ranks on this host need {format_bytes(sum(held))} by the plan's "
            f"forecast, and it has {format_bytes(memory_bytes)}",
            where=f"{where}: forecast",
            remedy="fewer ranks a host; or plan again with --memory "
            f"{memory_bytes // len(held) // 10**6}MB, and --recompute auto",
        )
