"""Work that a plan of many stages and ops asks for grows with them, not with their square or
cube."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdcompile.ir.records import written_buffers
from pdcompile.passes.codegen import body, generate
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.schedule.registry import ScheduleKind
from tests.helpers.cuts import cut
from tests.helpers.generated import captured, mean_square
from tests.helpers.schedules import chain, make_plan


def test_how_far_back_a_program_reaches_asks_each_stage_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages, asked = 24, 0
    spec = make_plan("1f1b", stages, stages, edges=chain(stages)).spec
    plain = ScheduleKind.group

    def group(self: ScheduleKind, replicas: int) -> int:
        nonlocal asked
        asked += 1
        return plain(self, replicas)

    monkeypatch.setattr(ScheduleKind, "group", group)
    assert spec.reach == 2
    assert stages <= asked <= 4 * stages


def test_only_ops_that_read_buffers_look_for_who_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ops are gone through for each of them."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = nn.functional.linear(x, layer.weight, layer.bias).relu()
            x = x * (1 + self.seen)
            self.seen.add_(1)
            return x

    found = captured(Counting(), torch.randn(4, 4), torch.randn(4, 4), mean_square)[2]
    asked = 0

    def counted(ops: object) -> frozenset[str]:
        nonlocal asked
        asked += 1
        return written_buffers(ops)  # type: ignore[arg-type]

    monkeypatch.setattr(body, "written_buffers", counted)
    sources = generate(found, cut(found, [4]))
    assert "self.seen.clone()" in sources.files["stage_1.py"]
    assert 1 <= asked <= 4


def test_the_modules_on_a_path() -> None:
    assert ancestors("a.b.0") == ("a", "a.b", "a.b.0")
    assert ancestors("") == ()
