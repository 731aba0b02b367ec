"""Output of `pdcompile costs`: units on every number, no formula cut."""

from __future__ import annotations

import sympy

from pdcompile.passes.costs.symbolic import SymbolicCosts, SymbolicOp

B, S = sympy.symbols("b s")
FORMULA = 12582912 * B * S**2 + 50331648 * B * S
OPS = (
    SymbolicOp("scores", "torch.matmul", "attention", (B, 12, S, S), FORMULA, 48 * B * S**2,
               98304 * B * S, True),
    SymbolicOp("view", "view", "", (B, S, 768), 0, 0, 0, False),
)  # fmt: skip
COSTS = SymbolicCosts(OPS, ("b", "s"), (("ids", (1,)),), "", (2, 3), ((2, 3),))


def test_no_formula_is_cut() -> None:
    assert str(COSTS).splitlines()[:2] == [
        f"scores: torch.matmul [b, 12, s, s] forward {FORMULA} FLOP, output 48*b*s**2 bytes, "
        "saved 98304*b*s bytes",
        "view: view [b, s, 768] forward 0 FLOP, output 0 B, saved 0 B  (concrete)",
    ]
    assert f"forward: {FORMULA} FLOP" in COSTS.summary()


def test_numbers_have_units() -> None:
    lines = str(COSTS.at(8, 512)).splitlines()
    assert lines[0] == (
        "scores: torch.matmul [8, 12, 512, 512] forward 26.6 TFLOP, output 101 MB, saved 403 MB"
    )
    assert {"outputs: 101 MB", "at b=8, s=512"} <= {*lines}
