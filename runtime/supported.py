"""Plans that this runtime can run: fewer than can be planned, checked and simulated."""

from __future__ import annotations

from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError
from pdcompile.plan import Plan


def check_supported(plan: Plan) -> None:
    """Raise ConfigError for devices, replicas or recomputation, which do not run yet."""
    cluster = Cluster.from_toml(plan.cluster, where="plan: cluster")
    others = sorted({device.kind for device in cluster.devices} - {"cpu"})
    if others:
        raise ConfigError(
            f"the plan is for {', '.join(others)} devices, and this version runs on cpu only",
            where="cluster",
            remedy='describe the machines that it is to run on now, with kind = "cpu"; '
            "`pdcompile plan`, `simulate` and `dump` work for any kind",
        )
    for stage in plan.stages:
        for found, remedy in (
            (stage.replicas > 1 and f"has {stage.replicas} replicas", "one replica a stage"),
            (stage.recompute and "recomputes its forward", "stages that do not recompute"),
        ):
            if found:
                raise ConfigError(
                    f"stage {stage.index} {found}, which is planned, checked and simulated, but "
                    "does not run yet",
                    where=f"plan: stages[{stage.index}]",
                    remedy=f"plan with {remedy}",
                )
