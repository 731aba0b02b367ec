"""Nasty models train as in eager, bit for bit, or are refused with the line: nothing in between."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from pdcompile.eager.module_copies import copy_of
from pdcompile.errors import PdcompileError
from tests.helpers.captures import rows
from tests.helpers.generated import mean_square
from tests.nasty.cases import CASES as FORWARDS
from tests.nasty.modules import MODULES

CASES = {**FORWARDS, **MODULES}
OPTIONS: dict[str, Any] = {
    "loss_fn": mean_square,
    "optimizer": partial(torch.optim.SGD, lr=0.1),
    "stages": 2,
    "microbatches": 2,
    "cluster": pdcompile.Cluster.local(2),
    "costs": "estimated",
}

EXACT = [name for name, (_, verdict) in CASES.items() if verdict != "refused"]
REFUSED = [name for name, (_, verdict) in CASES.items() if verdict == "refused"]


def around(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), CASES[name][0](), nn.Linear(8, 8))


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:captured as opaque", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", EXACT)
def test_two_steps_as_the_reference(name: str) -> None:
    model = around(name)
    twin = copy_of(model)
    pipe, reference = pdcompile.compile(model, **OPTIONS), pdcompile.reference(twin, **OPTIONS)
    for seed in range(2):
        batch, target = rows(8, seed=seed), rows(8, seed=seed + 9)
        ours, theirs = pipe.step(batch, target=target), reference.step(batch, target=target)
        assert float(ours.loss) == float(theirs.loss)
    state = pipe.full_state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in twin.state_dict().items())
    # As many samples as before: a loop over samples is captured for one size.
    assert torch.equal(pipe.predict(rows(8)), reference.predict(rows(8)))
    kept = any(op.opaque for op in pipe._running.compiled.capture.train.ops)
    assert kept == (CASES[name][1] == "kept")


@pytest.mark.filterwarnings("ignore:captured as opaque", "ignore::DeprecationWarning",
                            "ignore::FutureWarning", "ignore:Lazy modules")  # fmt: skip
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_place(name: str) -> None:
    with pytest.raises(PdcompileError) as caught:
        pdcompile.trace(around(name), rows())
    assert caught.value.remedy
    # What torch's own code does (old weight_norm) has no line of the user's, but a name.
    place = f"{caught.value.where} {caught.value.message}"
    assert "tests/nasty/cases.py:" in place or "1" in place.replace(".", " ").split()
