"""Models that cannot be captured faithfully are refused with file and line, and leave no trace."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdcompile.errors import ConfigError, TraceError
from pdcompile.passes.parts.layouts import lay_out
from tests.helpers.captures import captured, faithful, make, rows


def _if_tensor(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) if x.sum() > 0 else x


def _item(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) * x.max().item()


def _mask(self: nn.Module, x: Tensor) -> Tensor:
    y = self.lin(x)[x > 0]
    return y.sum() / (len(y) + 1)


def _parameter_value(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) * float(self.lin.bias[0])


def _python_random(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) * random.random()


def _numpy_random(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) * float(np.random.rand())


def _seed(self: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return self.lin(x)


def _asks_for_the_seed(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) * (torch.initial_seed() % 7)


def _rebound_buffer(self: nn.Module, x: Tensor) -> Tensor:
    self.ema = self.ema * 0.9 + self.lin(x).mean(0)
    return self.lin(x)


def _counter(self: nn.Module, x: Tensor) -> Tensor:
    self.calls += 1
    return self.lin(x)


def _sum_over_calls(self: nn.Module, x: Tensor) -> Tensor:
    self.last = self.lin(x) if self.last is None else self.lin(x) + self.last
    return self.last


def _hook(self: nn.Module, x: Tensor) -> Tensor:
    y = self.lin(x)
    y.register_hook(lambda grad: grad * 2)
    return y


def _backward(self: nn.Module, x: Tensor) -> Tensor:
    y = self.lin(x)
    y.sum().backward()
    return y @ self.lin.weight.grad


def _data(self: nn.Module, x: Tensor) -> Tensor:
    y = self.lin(x)
    y.data = x
    return y


def _parameter_written(self: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.lin.weight.mul_(0.5)
    return self.lin(x)


def _vmap(self: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * torch.rand(()), randomness="different")(self.lin(x))


def _new_generator(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) + torch.rand(8, generator=torch.Generator())


_state, _draw, _restore = random.getstate, random.random, random.setstate
_of_numpy, _seed_numpy, _draw_numpy, _restore_numpy = (
    np.random.get_state, np.random.seed, np.random.rand, np.random.set_state,
)  # fmt: skip


def _python_put_back(self: nn.Module, x: Tensor) -> Tensor:
    before = _state()
    y = self.lin(x) * _draw()
    _restore(before)
    return y


def _numpy_put_back(self: nn.Module, x: Tensor) -> Tensor:
    before = _of_numpy()
    _seed_numpy(7)
    y = self.lin(x) * float(_draw_numpy())
    _restore_numpy(before)
    return y


def _numpy_array(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x) * torch.from_numpy(np.arange(float(len(x))))[:, None]


def _hidden_write(self: nn.Module, x: Tensor) -> Tensor:
    y = self.lin(x)
    with torch._C.DisableTorchFunction():
        y.mul_(2)
    return y + 1


def _raises(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x @ x)


CASES: dict[Callable[..., Any], str] = {
    _if_tensor: "__bool__",
    _item: "item",
    _mask: "shape of the result of __getitem__",
    _parameter_value: "__float__",
    _python_random: "not torch's (random)",
    _numpy_random: "not torch's (rand)",
    _python_put_back: "Python's random module",
    _numpy_put_back: "numpy.random",
    _seed: "torch's default generator",
    _asks_for_the_seed: "asks for the seed",
    _rebound_buffer: "rebinds ema",
    _counter: "Python attribute calls",
    _sum_over_calls: "Python attribute last",
    _hook: "register_hook",
    _backward: "autograd itself",
    _data: "tensor.data",
    _parameter_written: "parameter lin.weight in place",
    _vmap: "torch.func transform",
    _new_generator: "Generator",
    _numpy_array: "capture cannot see",
    _hidden_write: "capture cannot see writes tensors",
    _raises: "raised RuntimeError",
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("forward", CASES, ids=lambda forward: forward.__name__)
def test_refused_with_file_and_line(forward: Callable[..., Any]) -> None:
    model = make(forward, ema=torch.zeros(8), calls=0, last=None)
    state = copy.deepcopy(model.state_dict())
    generators = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    plain = nn.Module.__call__
    with pytest.raises(TraceError) as caught:
        captured(model)
    error = caught.value
    assert CASES[forward] in error.message
    assert error.remedy
    first = forward.__code__.co_firstlineno
    last = max(line for *_, line in forward.__code__.co_lines() if line is not None)
    file, _, line = (error.where or "").rpartition(":")
    assert file.endswith("test_trace_refusals.py")
    assert first < int(line) <= last
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert (model.calls, model.last, model.training) == (0, None, True)
    assert random.getstate() == generators[0]
    assert np.random.get_state()[1].tolist() == generators[1]
    assert torch.equal(torch.get_rng_state(), generators[2])
    assert nn.Module.__call__ is plain


def test_state_inside_a_list() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        self.log.append(x.shape)
        return self.lin(x)

    model = make(forward, log=[])
    with pytest.raises(TraceError, match="Python attribute log"):
        captured(model)
    assert model.log == []


def test_wrapped_and_unusable_models() -> None:
    plain = make(lambda self, x: self.lin(x))
    with pytest.raises(TraceError, match="OptimizedModule"):
        captured(torch.compile(plain, backend="eager"))
    with pytest.raises(TraceError, match="DataParallel"):
        captured(nn.DataParallel(plain))
    compiled = make(lambda self, x: self.lin(x))
    compiled.compile(backend="eager")
    with pytest.raises(TraceError, match=r"module\.compile"):
        captured(compiled)
    lazy = make(lambda self, x: self.lazy(x), lazy=nn.LazyLinear(3))
    with pytest.raises(TraceError, match=r"'lazy\.weight' is not initialised"):
        _capture_without_checks(lazy)
    with pytest.raises(TraceError, match="sparse_coo"):
        _capture_without_checks(make(lambda self, x: x, table=torch.eye(3).to_sparse()))
    scripted = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(TraceError, match="TorchScript"):
        _capture_without_checks(make(lambda self, x: self.s(x), s=scripted))


def test_hooks_on_backward() -> None:
    model = make(lambda self, x: self.lin(x))
    model.lin.register_full_backward_hook(lambda module, given, got: (given[0] * 2,))
    with pytest.warns(UserWarning, match="captured as opaque: 'lin' .*hook on its backward"):
        captured(model)
    model = make(lambda self, x: self.lin(x))
    model.register_full_backward_pre_hook(lambda module, got: (got[0] * 2,))
    with pytest.raises(TraceError, match="the model has a hook on its backward"):
        captured(model)


def test_a_submodule_that_a_method_hides() -> None:
    model = make(lambda self, x: self._modules["type"](self.lin(x)))
    model.type = nn.Linear(8, 8)
    with pytest.raises(TraceError, match="'type' is hidden"):
        captured(model)


def _capture_without_checks(model: nn.Module) -> None:
    from pdcompile.passes.trace import trace

    trace(model, rows())


class _Way(Enum):
    DOUBLE = 2


def test_an_object_among_the_arguments() -> None:
    settings = type("Settings", (), {"scale": 2.0})()
    model = make(lambda self, x, given: self.lin(x) * given.scale)
    with pytest.raises(TraceError, match=r"the input given \(Settings\) is an object"):
        captured(model, rows(), settings)
    found = captured(make(lambda self, x, way: self.lin(x) * way.value), rows(), _Way.DOUBLE)
    assert found.train.constants == (("way", repr(_Way.DOUBLE)),)


def test_parameters_in_the_same_memory() -> None:
    model = make(lambda self, x: self.other(self.lin(x)), other=nn.Linear(8, 8))
    model.other.weight = nn.Parameter(model.lin.weight.data)
    with pytest.raises(TraceError, match="same memory"):
        captured(model)


def test_a_parameter_from_outside() -> None:
    outside = torch.ones(8, requires_grad=True)
    with pytest.raises(TraceError, match="not a parameter of the model"):
        captured(make(lambda self, x: self.lin(x) * outside))


def test_loss_that_is_no_scalar() -> None:
    with pytest.raises(TraceError, match=r"loss_fn returned a tensor of shape \(4, 8\)"):
        captured(make(lambda self, x: self.lin(x)), loss_fn=lambda y, t: y, target=rows())


def test_a_loss_of_pairs_is_captured_for_one_size() -> None:
    """Its shape depends on the size, not linearly, and no module is there to be opaque."""
    found = captured(
        nn.Linear(8, 8), loss_fn=lambda output, target: torch.pdist(output).mean(), target=rows()
    )
    assert found.train.sizes.smallest == found.train.sizes.largest == 4


def test_an_output_that_may_hide_tensors() -> None:
    with pytest.raises(TraceError, match=r"class functools\.partial, in which tensors may"):
        captured(make(lambda self, x: (x, functools.partial(torch.add, self.lin(x)))))


def test_an_embedding_that_renormalises_its_weight() -> None:
    model = make(lambda self, x: self.table(x), table=nn.Embedding(9, 4, max_norm=1.0))
    with pytest.raises(TraceError, match=r"parameter table\.weight"):
        captured(model, torch.arange(4))


def test_hostile_numbers_and_names_are_harmless(tmp_path: Any) -> None:
    class Loud(float):
        def __repr__(self) -> str:
            raise AssertionError("the model's own __repr__ was run")

    names = ["class", "self", "0", 'a"b', "x\ny", 'exec("raise SystemExit")', "None"]

    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(8, 8))
            self.register_parameter('p"q', nn.Parameter(torch.ones(8)))

        def forward(self, x: Tensor) -> Tensor:
            for name in names:
                x = self._modules[name](x)
            return x * self._parameters['p"q'] * Loud(2.0)

    model = Hostile()
    found = faithful(model)
    assert all(op.name.isidentifier() for op in found.train.ops)
    assert found.train.ops[-1].args[1] == 2.0
    assert type(found.train.ops[-1].args[1]) is float
    module = found.train.to_module()
    assert torch.equal(module(rows()), model(rows()))
    assert list(module.state_dict()) == list(model.state_dict())


def test_sizes_at_which_the_model_is_another() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = self.lin(x)
        if len(x) == 1:
            return y
        return self.lin(y) * min(len(x), 20)

    graph = captured(make(forward)).train
    assert (graph.sizes.smallest, graph.sizes.largest) == (2, 17)
    assert "other operators for other batch sizes" in graph.sizes.below
    assert "not linearly" in graph.sizes.above


def test_floats_that_depend_on_the_size() -> None:
    """Whole ones divide tensors as ints do; a note says of others what they are."""
    model = make(lambda self, x: self.lin(x) / (0.0 + 4 * len(x)))
    graph = captured(model).train
    assert (graph.sizes.smallest, graph.sizes.largest) == (1, 120)
    assert torch.equal(graph.to_module()(rows()), model(rows()))
    graph = captured(make(lambda self, x: self.lin(x) * (0.0 + 4 * len(x)))).train
    assert graph.sizes.is_one
    assert "call, as a float: " in graph.sizes.above
    with pytest.raises(
        ConfigError, match="of weights\\+samples, as microbatches have one"
    ) as caught:
        lay_out(graph, "weights+samples", 2)
    assert caught.value.remedy == "use parts=1"


def test_sizes_of_a_model_that_is_the_same_at_all() -> None:
    sizes = captured(make(lambda self, x: self.lin(x).t().reshape(8, -1).t())).train.sizes
    assert (sizes.smallest, sizes.largest, sizes.below, sizes.above) == (1, 120, "", "")


def test_a_loss_with_parameters_belongs_into_the_model() -> None:
    scale = nn.Parameter(torch.ones(8))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return ((out - target) * scale).square().mean()

    with pytest.raises(TraceError, match=r"^loss_fn uses a tensor of shape \(8,\)") as refused:
        captured(make(lambda self, x: self.lin(x)), loss_fn=loss, target=rows())
    assert "let the model hold" in str(refused.value.remedy)
    assert "test_trace_refusals.py:" in str(refused.value.where)


def test_a_teacher_in_the_loss_is_a_constant_once_it_needs_no_gradients() -> None:
    teacher = nn.Linear(8, 8)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(target)
        return (out - wanted).square().mean()

    with pytest.raises(TraceError, match=r"^loss_fn uses a tensor of shape \(8, 8\)") as refused:
        captured(make(lambda self, x: self.lin(x)), loss_fn=loss, target=rows())
    assert "eval() and requires_grad_(False)" in str(refused.value.remedy)
    teacher.eval().requires_grad_(False)  # as the remedy says
    captured(make(lambda self, x: self.lin(x)), loss_fn=loss, target=rows())


class Counted(nn.Module):
    """A loss with a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (out - target).square().mean() + self.calls


def test_a_loss_that_writes_its_buffer_belongs_into_the_model() -> None:
    with pytest.raises(TraceError, match=r"^loss_fn writes .* loss_fn\.calls in place") as refused:
        captured(make(lambda self, x: self.lin(x)), loss_fn=Counted(), target=rows())
    assert "let the model hold" in str(refused.value.remedy)
