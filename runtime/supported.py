"""Plans that this runtime can run: fewer than can be planned, checked and simulated."""

from __future__ import annotations

from pdcompile.cluster import Cluster
from pdcompile.eager.autocast import other_region
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.sparse_gradients import sparse_lookups
from pdcompile.plan import Plan


def check_supported(plan: Plan, graph: OpGraph) -> None:
    """Raise ConfigError for another autocast region than that of the devices, for what cannot be
    recomputed, and for gradients that cannot be summed over replicas; `graph` is what trains."""
    cluster = Cluster.from_toml(plan.cluster, where="plan: cluster")
    if other := other_region(plan.training.autocast, cluster.devices):
        raise ConfigError(
            other,
            where="autocast",
            remedy="plan again with a dtype: autocast='bfloat16' is the region of the devices",
        )
    _check_recomputation(plan, graph)
    _check_sums(plan, graph)
    _check_scaling(plan, graph)


def _check_recomputation(plan: Plan, graph: OpGraph) -> None:
    """Refuse hooks that would have to run twice, and are promised to run once."""
    stage_of = {name: stage for stage in plan.stages if stage.recompute for name in stage.ops}
    for op in graph.ops:
        if op.hooks and op.name in stage_of:
            raise ConfigError(
                f"stage {stage_of[op.name].index} recomputes its forward, and the forward hook "
                f"{op.hooks[0]} of the opaque module {op.module_path!r} does more than look: it "
                "returns something, or writes tensors or the module",
                where=op.module_path,
                remedy="do that in the module's forward; or recompute=False for this stage",
            )


def _check_scaling(plan: Plan, graph: OpGraph) -> None:
    """Refuse parameters whose gradients are in float16: divided by the scale they would vanish."""
    for fqn, info in graph.tensors.items() if plan.training.loss_scaling else ():
        if info.requires_grad and info.dtype == "float16":
            raise ConfigError(
                "this parameter is float16, and so is its gradient, which a GradScaler cannot "
                "divide by the scale",
                where=fqn,
                remedy="keep parameters in float32, and give autocast=torch.float16",
            )


def _check_sums(plan: Plan, graph: OpGraph) -> None:
    """Refuse sparse gradients where replicas sum them."""
    stage_of = {name: stage for stage in plan.stages if stage.replicas > 1 for name in stage.ops}
    shared = plan.num_ranks < sum(stage.replicas for stage in plan.stages)  # then all have as many
    for fqn, lookups in sparse_lookups(graph).items():
        stage = stage_of.get(lookups[0].name)
        if stage is not None:
            counts = tuple(1 if one is stage else one.replicas for one in plan.stages)
            instead = f"one replica for this stage, as in replicas={counts}"
            raise ConfigError(
                f"the gradient of this parameter is sparse ({lookups[0].source}), and the "
                f"{stage.replicas} replicas of stage {stage.index} sum dense ones",
                where=fqn,
                remedy=f"sparse=False; or {'replicas=1' if shared else instead}",
            )
