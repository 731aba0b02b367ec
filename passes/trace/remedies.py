"""Remedies for errors that the user's Python raised, by the arguments it was given."""

from __future__ import annotations

import re
from typing import Any

from pdcompile.batch import as_one_argument
from pdcompile.errors import TraceError
from pdcompile.passes.trace.refusals import APART, NO_PARAMETER

LOSS_AS_TENSOR = (
    "return the loss as the tensor that it is, without item() or float(): gradients need it"
)
LOSS_WITH_PARAMETERS = (
    "let the model hold the module that has it, and return the loss (no loss_fn then)"
)


def remedy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The remedy for an error that forward raised."""
    if len(args) == 1 and not kwargs:
        hint = as_one_argument(args[0])
        if hint:
            return hint
    for name, given in (*enumerate(args), *kwargs.items()):
        if _numbers(given):
            which = f"argument {name}" if isinstance(name, int) else f"{name}="
            return f"{which} is a list of numbers: pass a tensor, torch.tensor(…)"
    return "run the model once on the example inputs without pdcompile"


def remedy_of_loss(target: Any) -> str:
    """The remedy for an error that loss_fn raised."""
    if target is None:
        return "there was no target: pass target=… to step (example_target= to compile)"
    if _numbers(target):
        return "the target is a list of numbers: pass a tensor, torch.tensor(target)"
    return "run model and loss_fn once on the example inputs and target without pdcompile"


def tell_of_loss(refusal: TraceError) -> None:
    """Rewords a refusal for loss_fn, which was running when it arose."""
    refusal.message = re.sub("^forward ", "loss_fn ", refusal.message)
    refusal.remedy = (refusal.remedy or "").removesuffix(APART) or None
    if refusal.message.endswith(("(item)", "(__float__)")):
        refusal.remedy = LOSS_AS_TENSOR
    elif refusal.message.endswith(NO_PARAMETER):
        refusal.remedy = LOSS_WITH_PARAMETERS


def _numbers(given: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    if not isinstance(given, list) or not given:
        return False
    return all(isinstance(part, bool | int | float) or _numbers(part) for part in given)
