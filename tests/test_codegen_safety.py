"""Nothing that a model is named or made of becomes code."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pdcompile
from pdcompile.errors import SourceError
from pdcompile.ir.graph import Attr, Op, Slice, TorchLiteral
from pdcompile.passes.codegen import generate, stage_classes
from pdcompile.passes.codegen.safety import Imports
from pdcompile.passes.codegen.safety import check as check_text
from pdcompile.passes.form.expressions import Scope, literal, plain, tensor_attribute
from tests.helpers import models
from tests.helpers.cuts import cut
from tests.helpers.generated import captured, check, mean_square

INJECTION = "x = 0); import os; getattr(os, 'system')('touch pwned'); (y"
HOSTILE = [
    "self", "class", "None", "0", "12", 'a"b', "a'b", 'a"b\'c', "back\\slash", "new\nline",
    "tab\t", "\u2028", "'''", '"""', "{x}", "# comment", "é", "ﬁ", "__x", "__init__x",
    "__import__('os')", INJECTION, "loss", "draw", "torch", "nn", "F", "x", "b", "super", " ",
    "a" * 150, "lambda", "match", "_",
]  # fmt: skip


class Named(nn.Module):
    """Leaves, blocks and tensors under any name."""

    def __init__(self, names):
        super().__init__()
        self.names = list(names)
        for name in names:
            self.add_module(name, Inner(name))

    def forward(self, x):
        for name in self.names:
            x = self._modules[name](x)
        return x


class Inner(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(3, 3))
        self.register_parameter(f"{name}w", nn.Parameter(torch.randn(3)))
        self.register_buffer(f"{name}b", torch.randn(3))

    def forward(self, x):
        x = self._modules[self.name](x)
        return (
            F.dropout(x * self._parameters[f"{self.name}w"], 0.2, self.training)
            + (self._buffers[f"{self.name}b"])
        )


def assert_harmless(sources, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = set()
    for cls in stage_classes(sources):  # which runs the source as it is
        keys |= set(cls().state_dict())
    assert keys == set(model.state_dict())
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [HOSTILE[i::5] for i in range(5)] + [[name] for name in HOSTILE], ids=ascii
)
def test_hostile_names_are_names(names, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Named(names)
    sources, _ = check(model, torch.randn(2, 3), [2], torch.randn(2, 3), mean_square)
    assert_harmless(sources, model, tmp_path, monkeypatch)


def test_all_hostile_names_at_once(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Named(HOSTILE)
    sources, _ = check(model, torch.randn(2, 3), [31, 62], torch.randn(2, 3), mean_square)
    assert_harmless(sources, model, tmp_path, monkeypatch)


class Loss(nn.Module):
    """Parts named as methods of a stage: a buffer that is written, and a leaf that draws."""

    def __init__(self):
        super().__init__()
        self.forward_, self.loss = nn.Linear(4, 4), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.loss(self.forward_(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_part_named_as_a_method_of_a_stage_trains(recompute):
    torch.manual_seed(0)
    model = nn.Module()
    model.a, model.loss, model.b = nn.Linear(4, 4), Loss(), nn.Linear(4, 2)
    model.forward = lambda x: model.b(model.loss(model.a(x)))
    twin = copy.deepcopy(model)
    twin.forward = lambda x: twin.b(twin.loss(twin.a(x)))
    options = {"loss_fn": F.mse_loss, "microbatches": 2}
    expected = pdcompile.reference(twin, **options)
    pipe = pdcompile.compile(
        model, stages=1, costs="estimated", progress=False, recompute=recompute, **options
    )
    for t in range(2):
        x, y = torch.full((4, 4), t + 1.0), torch.ones(4, 2)
        assert float(pipe.step(x, target=y).loss) == float(expected.step(x, target=y).loss)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.text(min_size=1, max_size=20).filter(lambda n: "." not in n))
def test_any_name_is_a_name(name):
    if hasattr(nn.Module(), name):
        return  # torch refuses it
    model = Named([name])
    sources, _ = check(model, torch.randn(2, 3), [1], torch.randn(2, 3), mean_square)
    keys = {key for cls in stage_classes(sources) for key in cls().state_dict()}
    assert keys == set(model.state_dict())


class Hostile(int):
    def __repr__(self):
        return "__import__('os').system('touch pwned')"


@pytest.mark.parametrize("value", [Hostile(3), object(), {1}, b"bytes", range(3), print])
def test_values_of_unknown_types_are_refused(value):
    with pytest.raises(SourceError, match="cannot be written as source"):
        plain(value)


def a_scope() -> Scope:
    return Scope(str, str, str, lambda: "x.device", str, str)


@pytest.mark.parametrize(
    "value",
    [
        TorchLiteral("dtype", "float32'); import os"),
        TorchLiteral("dtype", "load"),
        TorchLiteral("layout", "float32"),
        TorchLiteral("device", "cpu'); import os"),
    ],
)
def test_torch_literals_are_looked_up(value):
    with pytest.raises(SourceError):
        literal(value, a_scope())


def test_slices_outside_an_index_are_calls():
    assert literal((Slice(1, None), ...), a_scope()) == "(slice(1, None, None), ...)"


@pytest.mark.parametrize("name", ["__class__", "x; import os", "", "no_such_method", "shape)"])
def test_methods_and_properties_are_those_of_tensor(name):
    with pytest.raises(SourceError):
        tensor_attribute(name, method=True)
    with pytest.raises(SourceError):
        tensor_attribute(name, method=False)


def with_first_op(**changes):
    model = models.mlp()
    inputs, target = models.batch_for(model, 4)
    _, _, found = captured(model, inputs, target, models.square_loss)

    def changed(graph):
        ops = [
            dataclasses.replace(op, **changes) if op.target == "torch.relu" else op
            for op in graph.ops
        ]
        return dataclasses.replace(graph, ops=tuple(ops))

    return dataclasses.replace(found, train=changed(found.train), eval=changed(found.eval))


@pytest.mark.parametrize(
    "target",
    ["torch.load", "os.system", "torch.hub.load", "builtins.eval", "torch.relu(x); import os",
     "torch.ops.load_library", "torch.serialization.load", "subprocess.run.apply"],
)  # fmt: skip
def test_functions_are_resolved_against_the_allowed_ones(target):
    found = with_first_op(target=target)
    with pytest.raises(SourceError):
        generate(found, cut(found, [3]))


def test_a_hostile_variable_or_source_line_stays_a_comment(tmp_path, monkeypatch):
    found = with_first_op(variable=INJECTION, source=f"file.py\n{INJECTION}:3")
    classes = {
        path: (name, f"m.py\n{INJECTION}") for path, (name, _) in found.train.classes.items()
    }
    found = dataclasses.replace(found, train=dataclasses.replace(found.train, classes=classes))
    sources = generate(found, cut(found, [3]))
    assert_harmless(sources, models.mlp(), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from os import system",
        "__import__('os')",
        "eval('1')",
        "open('x')",
        "torch.load('x')",
        "torch.hub.load('x')",
        "x.__class__.__bases__",
        "(lambda: 0)()",
        "x = [i for i in range(3)]",
        "exec('1')",
        "f = torch",
        "del x",
        "global x",
        "assert x",
        "nn.functional.gelu(x)",
        "torch.nn.init.zeros_(x)",
        "while True: pass",
        "print(x)",
    ],
)
def test_the_last_look_refuses_what_no_stage_needs(line):
    with pytest.raises(SourceError):
        check_text(stage_with(line), Imports(), (), "stage_0.py")


def stage_with(line):
    return (
        "import torch\nfrom torch import nn\n\n\nclass Stage0(nn.Module):\n"
        f"    def forward(self, x):\n        {line}\n        return x\n"
    )


def test_the_last_look_lets_ordinary_stages_pass():
    check_text(stage_with("x = torch.relu(x)"), Imports(), {"torch.relu"}, "stage_0.py")


def test_an_unknown_class_is_refused():
    found = with_first_op(kind="module", target="torch.nn.Nothing", module_path="layers.0")
    with pytest.raises(SourceError, match="not a module"):
        generate(found, cut(found, [3]))


def test_attr_names_of_ops_are_checked():
    op = Op("a", "getattr", "__dict__", (Attr("w"),))
    found = with_first_op(kind=op.kind, target=op.target)
    with pytest.raises(SourceError, match="Tensor has no property"):
        generate(found, cut(found, [3]))
