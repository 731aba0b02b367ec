"""Torch's internals are what torch itself uses, in the release that is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pdcompile.releases.torch_internals import (
    CHECKPOINT_REGION,
    Place,
    region_preserves_rng,
)

X = torch.ones(2)


def calls(place: Place, run: Callable[[], object], patch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each call of what is at a place."""
    home, name = place
    plain, found = getattr(home, name), []

    def spy(*args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs))
        return plain(*args, **kwargs)

    patch.setattr(home, name, spy)
    run()
    return found


@pytest.mark.parametrize("preserve", [True, False])
def test_regions_pass_the_place_that_a_capture_patches(
    preserve: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        checkpoint(torch.sin, x, use_reentrant=False, preserve_rng_state=preserve).sum().backward()

    ((args, kwargs),) = calls(CHECKPOINT_REGION, run, monkeypatch)
    assert region_preserves_rng(args, kwargs) == preserve
    assert x.grad is not None
