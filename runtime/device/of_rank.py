"""Device of a process: its kind from the plan's cluster, and its number on its host."""

from __future__ import annotations

import os
from collections.abc import Collection

from pdcompile.cluster import Cluster
from pdcompile.errors import LaunchError
from pdcompile.hardware import devices
from pdcompile.plan import Plan
from pdcompile.runtime.device.queued_device import QueuedDevice
from pdcompile.runtime.device.rank_device import RankDevice


def device_of(plan: Plan, ranks: Collection[int], *, alone: bool) -> RankDevice:
    """The device of a process that has these ranks.

    The processes of a host have GPUs by their numbers (LOCAL_RANK), in turn where there are fewer;
    a process that is `alone` has all stages on the first one that torch sees.

    Raises:
        LaunchError: torch finds no GPU.
    """
    cluster = Cluster.from_toml(plan.cluster, where="plan: cluster")
    others = {cluster.devices[rank].kind for rank in ranks if not cluster.devices[rank].on_host}
    if not others:
        return RankDevice()
    count = devices.gpus()
    if not count:
        raise LaunchError(
            f"the plan has this process on {', '.join(sorted(others))}, and torch finds no GPU",
            where="plan: cluster",
            remedy="run it on such machines, or plan again for what is here: --cluster auto",
        )
    number = 0 if alone else int(os.environ.get("LOCAL_RANK", "0"))
    return QueuedDevice(devices.gpu(number % count))
