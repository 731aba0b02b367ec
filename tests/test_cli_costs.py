"""What `pdcompile costs` prints: units on every number, no formula cut."""

from __future__ import annotations

from io import StringIO

import sympy

from pdcompile.cli.costs import _shown
from pdcompile.passes.costs.symbolic import SymbolicCosts, SymbolicOp
from pdcompile.report.labels import Terminal

B, S = sympy.symbols("b s")
FORMULA = 12582912 * B * S**2 + 50331648 * B * S
OPS = (
    SymbolicOp("scores", "torch.matmul", "attention", (B, 12, S, S), FORMULA, 48 * B * S**2,
               98304 * B * S, True),
    SymbolicOp("view", "view", "", (B, S, 768), 0, 0, 0, False),
)  # fmt: skip
COSTS = SymbolicCosts(OPS, ("b", "s"), (("ids", (1,)),), "", (2, 3), ((2, 3),))


def printed(costs: SymbolicCosts, width: int) -> list[str]:
    file = StringIO()
    console = Terminal(file=file, width=width)
    for one in _shown(console, costs):
        console.print(one, soft_wrap=isinstance(one, str))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_formulas_that_do_not_fit_a_line_are_not_cut() -> None:
    assert printed(COSTS, 80) == [
        "scores  b x 12 x s x s",
        f"    forward {FORMULA} FLOP",
        "    output 48*b*s**2 bytes",
        "    saved for backward 98304*b*s bytes",
        "view  b x s x 768  concrete",
        "    forward 0 FLOP",
        "    output 0 B",
        "    saved for backward 0 B",
    ]
    assert any(str(FORMULA) in line and "scores" in line for line in printed(COSTS, 160))


def test_numbers_have_units_and_fit() -> None:
    lines = printed(COSTS.at(8, 512), 80)
    scores = next(line for line in lines if "scores" in line)
    for cell in ("8 x 12 x 512 x 512", "26.6 TFLOP", "101 MB", "403 MB"):
        assert cell in scores
    assert max(map(len, lines)) <= 80
    assert "outputs: 101 MB" in COSTS.at(8, 512).summary()
    assert "at b=8, s=512" in COSTS.at(8, 512).summary()
    assert f"forward: {FORMULA} FLOP" in COSTS.summary()
