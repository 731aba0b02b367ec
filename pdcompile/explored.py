"""The driver's way to a plan when more than the cut is open: replicas, schedule, microbatches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from pdcompile.choices import Choices
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.options import Options
from pdcompile.passes.planning.explore import Explored, explore
from pdcompile.passes.planning.optimizer_state import optimizer_memory
from pdcompile.passes.profile.fitted_sizes import Sizes
from pdcompile.plan import Plan, Training, check
from pdcompile.problem.searching import Open, search_space
from pdcompile.steps import Steps

if TYPE_CHECKING:
    from torch import nn


def explored_plan(
    model: nn.Module,
    captured: Capture,
    options: Options,
    chosen: Choices,
    wish: Open,
    step: Steps,
) -> Plan:
    """Costs at every microbatch size that comes up, the search, and the plan it ends with.

    Raises:
        InfeasibleError: no plan of the space fits (NotFoundError: none was found).
        ConfigError: wishes that cannot be.
    """
    takes, assumed = optimizer_memory(options.optimizer)
    space = search_space(wish, options, chosen, captured.train.sizes)

    said = [assumed] if assumed else []
    sizes = Sizes(
        captured.train,
        model,
        [-(-chosen.batch_size // m) for m in space.microbatches],
        costs=options.costs,
        device_kind=chosen.cluster.devices[0].kind,
        progress=step.listener.part,
        say=said.append,
    )

    @cache
    def graph_at(m: int) -> OpGraph:
        return sizes.at(-(-chosen.batch_size // m))

    training = Training(
        batch_size=chosen.batch_size,
        loss_reduction=chosen.loss_reduction,
        autocast=chosen.autocast,
        max_grad_norm=options.max_grad_norm,
        optimizer_factor=takes.factor,
        seed=options.seed,
        step=takes.step,
        keeps_outputs=options.outputs != "none",
    )

    def search() -> Explored:
        return explore(
            graph_at,
            chosen.cluster,
            space,
            training,
            constraints=options.constraints,
            time_limit=options.time_limit,
            seed=options.seed,
            progress=step.listener.found,
        )

    step("costs", lambda: [graph_at(m) for m in space.microbatches])
    plan = step("plan", search).plan
    check(plan, graph_at(plan.training.num_microbatches), chosen.cluster)
    return replace(plan, notes=(*plan.notes, *chosen.cluster.notes, *said))
