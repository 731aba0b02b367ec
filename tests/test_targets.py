"""Names of operators: there and back, and nothing else."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from pdcompile.errors import SourceError, TraceError
from pdcompile.ir.graph import TorchLiteral
from pdcompile.ir.targets import from_literal, literal, method_name, name_of, operator_for, resolve


class Cubed(torch.autograd.Function):
    """Importable by name."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x**3

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.gelu, "torch.nn.functional.gelu"),
        (F.max_pool2d, "torch.nn.functional.max_pool2d"),
        (F.scaled_dot_product_attention, "torch.nn.functional.scaled_dot_product_attention"),
        (torch.relu, "torch.relu"),
        (torch.cat, "torch.cat"),
        (torch.einsum, "torch.einsum"),
        (torch.fft.rfft, "torch.fft.rfft"),
        (torch.linalg.norm, "torch.linalg.norm"),
        (operator.add, "operator.add"),
        (operator.getitem, "operator.getitem"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (torch.ops.aten.add, "torch.ops.aten.add"),
    ],
)
def test_names_resolve_to_what_they_name(function: object, name: str) -> None:
    assert name_of(function) == name  # type: ignore[arg-type]
    assert resolve(name) == function


def test_custom_functions_by_qualified_name() -> None:
    name = name_of(Cubed.apply)
    assert name.endswith("test_targets.Cubed.apply")
    assert resolve(name)(torch.tensor(2.0)) == 8.0


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "torch.save",
        "torch.hub.load",
        "torch.from_file",
        "torch.ops.aten.from_file",
        "torch.ops.load_library",
        "torch.os.system",
        "torch.utils.cpp_extension.load",
        "torch.compile",
        "torch.nn.Linear",
        "os.system",
        "builtins.eval",
        "operator.attrgetter",
        "operator.call",
        "torch.nn.functional.__loader__",
        "torch.no_such_function",
        "no.such.Function.apply",
        "subprocess.Popen.apply",
        "",
        ".",
    ],
)
def test_everything_else_is_refused(name: str) -> None:
    with pytest.raises(SourceError, match="no operator is called"):
        resolve(name)


def test_a_function_whose_class_is_inside_of_another_one_is_told_where_to_stand() -> None:
    """Importing its module, which has it no more, would not help."""
    with pytest.raises(SourceError) as caught:
        resolve(f"{__name__}.made.<locals>.Square.apply")
    assert "at the top of a module" in str(caught.value.remedy)


def test_a_function_of_nobody() -> None:
    with pytest.raises(TraceError, match="no public name"):
        name_of(lambda x: x)


def test_what_fills_parameters_of_a_module_that_a_call_makes() -> None:
    with pytest.raises(TraceError) as caught:
        name_of(torch.nn.init.kaiming_uniform_)
    assert "run the model once before" in str(caught.value.remedy)


def test_methods_and_the_operators_behind_them() -> None:
    assert method_name(torch.Tensor.view) == "view"
    assert method_name(torch.relu) is None
    assert operator_for("add") == (operator.add, False)
    assert operator_for("__rsub__") == (operator.sub, True)
    assert operator_for("view") is None


def test_literals() -> None:
    cpu = torch.device("cpu")
    for value in (torch.float32, torch.bool, torch.channels_last, torch.strided):
        assert from_literal(literal(value, cpu), cpu) is value
    assert literal(cpu, cpu) == TorchLiteral("device", "self")
    assert literal(torch.device("meta"), cpu) == TorchLiteral("device", "meta")
    assert from_literal(TorchLiteral("device", "self"), torch.device("meta")).type == "meta"
    with pytest.raises(SourceError, match="no dtype"):
        from_literal(TorchLiteral("dtype", "load"), cpu)
