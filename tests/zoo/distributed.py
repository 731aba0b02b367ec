"""Models of the zoo under torchrun: is what every rank has eager's, to the last bit?

    torchrun --nproc-per-node=2 -m tests.zoo.distributed gpt2 t5

One stage a rank, two minibatches of two microbatches with dropout; losses, outputs, and the
gradients of the rank's own parameters.  One line a rank and model; exit code 1 at a difference.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

import pdcompile
from tests.zoo.case import Case, build
from tests.zoo.models import ENTRIES

DROPOUT = 0.1
STEPS = 2


def train(runner: Any, case: Case) -> dict[str, torch.Tensor | None]:
    """Losses, outputs and this rank's gradients, by name; nothing is updated."""
    found: dict[str, torch.Tensor | None] = {}
    for step in range(STEPS):
        inputs = case.inputs(step)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        result = runner.step_call(args, kwargs, case.target(step))
        found[f"loss of step {step}"] = result.loss.wait()
        for path, leaf in pytree.tree_flatten_with_path(result.outputs)[0]:
            if isinstance(leaf, torch.Tensor):
                found[f"output {pytree.keystr(path)} of step {step}"] = leaf
        for name, parameter in runner.named_parameters():
            gradient = parameter.grad
            found[f"gradient {name} of step {step}"] = (
                None if gradient is None else gradient.detach().clone()
            )
    return found


def differing(name: str) -> tuple[int, list[str]]:
    """Number of tensors that this rank compared, and those which differ."""
    case = build(ENTRIES[name], DROPOUT)
    options: dict[str, Any] = {
        "loss_fn": case.loss_fn,
        "optimizer": None,
        "microbatches": 2,
        "batch_dims": case.batch_dims,
        "keep_model": True,
    }
    pipe = pdcompile.compile(
        case.model, costs="estimated", verify="off", outputs="all", time_limit=0, **options
    )
    with pipe:
        found = train(pipe, case)
        plan = pipe.plan
    expected = train(pdcompile.reference(case.model, plan=plan, **options), case)
    return len(found), [key for key in found if not _equal(found[key], expected[key])]


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worst = 0
    for name in names:
        count, lines = differing(name)
        said = f"differs: {', '.join(lines)}" if lines else "exact"
        print(f"rank {os.environ['RANK']} {name}: {count} tensors, {said}", flush=True)
        worst |= bool(lines)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
