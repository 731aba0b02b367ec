"""Options with a plan: what is not said is the plan's, what contradicts it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdcompile.cluster import HOST_KIND
from pdcompile.eager.autocast import autocast_text
from pdcompile.eager.loss_scale import scaler_of
from pdcompile.errors import ConfigError
from pdcompile.options import Options
from pdcompile.options.table import ROWS
from pdcompile.plan import Plan
from pdcompile.schedule.registry import name_of


def completed(options: Options, plan: Plan) -> Options:
    """The options, with what a plan was made with in place of what is not said."""
    return replace(options, **{
        name: value for name, value in _recorded(plan).items() if not _said(options, name)
    })  # fmt: skip


def refuse_others(options: Options, plan: Plan) -> None:
    """Refuse options that contradict a plan.  Which outputs it can give depends on the model.

    Raises:
        ConfigError: names what differs, and what the plan has.
    """
    has = _recorded(plan) | {"loss_reduction": plan.training.loss_reduction}
    asked = {name: _asked(options, name, has[name], len(plan.stages)) for name in has}
    if has["loss_reduction"] == "callable" != asked["loss_reduction"]:
        raise ConfigError(
            "the plan was made with a function as loss_reduction, which a plan does not hold",
            where="plan: training.loss_reduction",
            remedy="give the same function: loss_reduction=… of compile or Workload "
            f"(--loss-reduction {plan.named_reduction or 'FILE:FUNCTION'})",
        )
    differing = [name for name in has if name != "outputs" and asked[name] != has[name]]
    for name in differing[:1]:
        stated, other = has[name], asked[name]
        if name == "schedule":
            stated, other = name_of(stated), name_of(other)
        unlike, one = " with other tasks" if stated == other else "", len(differing) == 1
        raise ConfigError(
            f"the plan has {name}={stated!r}, but the options ask for {other!r}{unlike}",
            where=f"plan: {ROWS[name].plan}",
            remedy=f"leave {', '.join(differing)} out, as the plan says {'it' if one else 'them'}; "
            "or plan again with these options",
        )


def _recorded(plan: Plan) -> dict[str, Any]:
    """The options that a plan was made with, as far as it tells; a function it does not hold."""
    training, counts = plan.training, tuple(stage.replicas for stage in plan.stages)
    if training.kind.dispatched:  # they follow
        counts = (1,)
    sent = "everything" if training.sends_outputs else "last"
    found = {
        name: getattr(training, place)
        for name, (of, _, place) in ((n, row.plan.partition(".")) for n, row in ROWS.items())
        if of == "training"
    } | {
        "stages": len(plan.stages),
        "replicas": counts[0] if len({*counts}) == 1 else counts,
        "recompute": tuple(stage.recompute for stage in plan.stages),
        "outputs": sent if training.keeps_outputs else "none",
    }
    if training.loss_reduction == "callable":
        del found["loss_reduction"]
    if training.outputs_by_size:
        del found["outputs"]
    if training.parts == 1:
        del found["split"]
    return found


def _said(options: Options, name: str) -> bool:
    """True if the user decided this one, and did not leave it to the planner."""
    left = getattr(options, name) in ("auto", "any")
    return not left and (name in options.said or not ROWS[name].is_open)


def _asked(options: Options, name: str, stated: Any, stages: int) -> Any:
    """The value of an option in the form in which a plan states it; `stated` if it says nothing."""
    given = getattr(options, name)
    if not _said(options, name):
        return None if stated == "callable" else stated
    if name == "autocast":
        return autocast_text(given, (stated or HOST_KIND).partition(":")[0])
    if name == "grad_scaler":
        return scaler_of(given) is not None
    if name == "loss_reduction":
        return "callable" if callable(given) else given
    if name == "recompute":
        return (given,) * stages if isinstance(given, bool) else tuple(given)
    if name == "replicas":
        if given == "equal" and isinstance(stated, int):
            return stated
        same = isinstance(given, tuple) and len(given) == stages and len(set(given)) == 1
        return given[0] if same else given
    return given
