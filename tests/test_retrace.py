"""Every stage has the ops of the capture: what is generated, and no mutation of it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.batch import example_call, resolve_batch
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.codegen import generate
from pdcompile.passes.trace import capture
from pdcompile.passes.verify.retrace import retraced
from pdcompile.plan import Plan
from tests.helpers import models
from tests.helpers.cuts import cut


class Layer(nn.Module):
    """Has ops of every kind: views, operators, buffers that are written, draws, tuples, regions."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.25)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.lin(x).chunk(2, dim=-1)
        y = a - b * self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        y = y.view(x.shape[0], 2, 4).transpose(1, 2).reshape(x.shape[0], 8)
        y = F.dropout(y, 0.1, self.training)
        top, where = y.topk(2, dim=-1)
        y = torch.cat([y[:, 1:], top[:, :1]], dim=1) / (self.scale + 2)
        y = y / self.scale.norm()  # which is written in Python, and passes its defaults on
        return x + self.drop(F.gelu(y, approximate="tanh")) + where.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x.clone()
        x[:, 0] = 1.5
        x = x * x.new_ones(())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.head(x)
        return x.float()


@cache
def made() -> tuple[Capture, Plan, Sources]:
    """Three layers on two stages, cut inside of the second one."""
    torch.manual_seed(0)
    model = Model()
    flat = example_call(model, torch.randn(6, 8), torch.randn(6, 1))
    found = capture(model, flat, resolve_batch(flat), F.mse_loss, microbatch_size=3)
    count = sum(op.region == "forward" for op in found.train.ops)
    plan = cut(found, [count // 2])
    return found, plan, generate(found, plan)


def test_what_is_generated_has_the_ops_of_the_capture() -> None:
    found, plan, sources = made()
    assert retraced(found, plan, sources) == (len(found.train.ops) + len(found.eval.ops), [])


def test_models_without_memory_are_compared_too() -> None:
    model = models.gpt(dropout=0.1, layers=1)
    inputs, target = models.batch_for(model, 4)
    flat = example_call(model.to("meta"), inputs, target)
    found = capture(model, flat, resolve_batch(flat), models.token_loss, microbatch_size=2)
    plan = cut(found, [5, 14])
    assert retraced(found, plan, generate(found, plan))[1] == []


class Mutation(ast.NodeTransformer):
    """Changes the nth place of a file where something of a forward can be changed; `said` tells
    what was, None where there are fewer places."""

    def __init__(self, nth: int) -> None:
        self.said: str | None = None
        self._left = nth

    def _now(self, node: ast.AST) -> bool:
        self._left -= 1
        if self._left == -1:
            self.said = ast.unparse(node)
        return self._left == -1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self.generic_visit(node) if node.name in ("forward", "loss") else node

    def visit_With(self, node: ast.With) -> Any:
        if self._now(node.items[0]):
            return node.body  # without its region
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Call) and self._now(node):
            return ast.Pass()  # a draw or a call that is left out
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        number = isinstance(node.right, ast.Constant) or isinstance(node.left, ast.Constant)
        if not number and self._now(node):  # of which torch knows no order
            return ast.BinOp(node.right, node.op, node.left)
        if self._now(node):
            return ast.BinOp(node.left, ast.FloorDiv(), node.right)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        head = ast.unparse(node.func)
        if node.args and not head.startswith("self.layers") and self._now(node):
            return node.args[0]  # an op that is dropped
        if head == "torch.cat" and self._now(node):
            return ast.Call(ast.parse("torch.stack", mode="eval").body, node.args, node.keywords)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, int | float) and self._now(node):
            return ast.Constant(node.value + 1)
        return node


def mutated(file: str, every: int) -> Iterator[tuple[str, Sources]]:
    """One change of so many: its words, and the sources with it."""
    sources = made()[2]
    tree, nth = ast.parse(sources.files[file]), 0
    while True:
        mutation = Mutation(nth)
        text = ast.unparse(ast.fix_missing_locations(mutation.visit(copy.deepcopy(tree))))
        if mutation.said is None:
            return
        yield mutation.said, replace(sources, files={**sources.files, file: text}, edited=(file,))
        nth += every


@pytest.mark.parametrize("file", ["stage_0.py", "stage_1.py"])
def test_whatever_computes_something_else_is_found(file: str, fast: bool) -> None:
    found, plan, _ = made()
    missed, count = [], 0
    for said, sources in mutated(file, 8 if fast else 1):
        count += 1
        try:
            if not retraced(found, plan, sources)[1]:
                missed.append(said)
        except pdcompile.PdcompileError:  # it does not run
            pass
    assert count > (5 if fast else 40)
    assert missed == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("nn.Dropout(p=0.25)", "nn.Dropout(p=0.5)", "has made layers.0.drop with other arguments"),
        ("F.gelu(", "(lambda x, **_: F.relu(x))(", "calls torch.nn.functional.relu"),
        ("draw(self, 0)", "draw(self, 1)", "on the random stream ('layers.0', 1) instead of"),
        ("with torch.no_grad():", "if True:", "where autograd records"),
        ("self.mean.clone()", "self.mean", "with another argument 1 (layers.0.mean instead of"),
        ('approximate="tanh"', 'approximate="none"', "with another approximate ('none' instead of"),
        ("x.shape[0]", "3", "calls view with another argument 1 (3 instead of 4)"),
    ],
)
def test_the_call_that_differs_is_named(old: str, new: str, said: str) -> None:
    found, plan, sources = made()
    text = sources.files["stage_0.py"]
    assert old in text
    wrong = replace(sources, files={**sources.files, "stage_0.py": text.replace(old, new)})
    first = retraced(found, plan, wrong)[1][0]
    assert (first.what, first.stage, first.mode) == ("op", 0, "train")
    assert said in first.first
