"""Ways of writing a model that are legal and a little unusual: captured, or kept whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.captures import faithful, make, targets


def test_a_module_that_runs_on_lent_weights_is_captured_inside() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        halved = {name: tensor * 0.5 for name, tensor in self.lin.named_parameters()}
        return torch.func.functional_call(self.lin, halved, (x,)) + self.lin(x)

    found = targets(faithful(make(forward)))
    assert found.count("Linear") == found.count("linear") == 1


def test_an_expanded_buffer_is_left_alone() -> None:
    scale = torch.ones(1, 1).expand(1, 8)
    model = make(lambda self, x: self.lin(x) * self.scale, scale=scale)
    faithful(model)
    assert model.scale is scale


class OtherDefault(nn.Module):
    """Makes a tensor while the default dtype is another one."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            tenth = torch.ones(8) * 0.1
        finally:
            torch.set_default_dtype(before)
        return (x * tenth).to(x.dtype)


def test_another_default_dtype_is_kept_with_the_module_that_sets_it() -> None:
    model = make(lambda self, x: self.part(self.lin(x)), part=OtherDefault())
    with pytest.warns(UserWarning, match="kept whole.*default dtype.*torch.float64"):
        faithful(model)
