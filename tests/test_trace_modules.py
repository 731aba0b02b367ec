"""OpGraph.to_module: a module that behaves like the model."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile.errors import InputError, TraceError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.trace import capture, trace
from tests.helpers import fidelity, models
from tests.helpers.captures import captured, make, rows


def assert_alike(model: nn.Module, module: nn.Module, *args: object) -> None:
    """Equal outputs, gradients, buffers and draws, in both modes, each starting afresh."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    results = []
    for training in (True, False):
        for run in (model, module):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            run.train(training)
            model.zero_grad()
            torch.manual_seed(0)
            output = run(*args)
            if training:
                output.sum().backward()
            grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            buffers = [buffer.clone() for buffer in model.buffers()]
            results.append((output, grads, buffers, torch.get_rng_state()))
    for eager, graph in (results[:2], results[2:]):
        flat = [torch.utils._pytree.tree_leaves(part) for part in (eager, graph)]
        assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True) if a is not None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet", "unet"])
def test_behaves_like_the_model(name: str) -> None:
    model = models.gpt(dropout=0.1, layers=2) if name == "gpt" else getattr(models, name)()
    module = trace(model, models.batch_for(model, 4)[0]).to_module()
    assert list(module.state_dict()) == list(model.state_dict())
    for remove in (True, False):
        mine = dict(module.named_parameters(remove_duplicate=remove))
        assert list(mine) == [n for n, _ in model.named_parameters(remove_duplicate=remove)]
    assert all(mine[n] is p for n, p in model.named_parameters(remove_duplicate=False))
    assert_alike(model, module, models.batch_for(model, 5)[0])


def test_modes_that_run_other_operators() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if self.training:
            return F.dropout(self.lin(x), 0.5) * 2
        return self.lin(x).sigmoid()

    model = make(forward)
    assert_alike(model, trace(model, rows()).to_module(), rows(3))
    assert_alike(model, trace(model.eval(), rows()).to_module(), rows(3))


def test_a_training_flag_is_followed() -> None:
    model = make(lambda self, x: F.dropout(self.lin(x), 0.5, self.training))
    module = trace(model, rows()).to_module()
    assert_alike(model, module, rows(3))


def test_arguments_regions_and_structure() -> None:
    def forward(self, x, *, y=None, scale=1.0):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            mean = self.lin(x).mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.lin(x).float()
        return {"z": z * mean * scale, "y": [y, None, x.shape[0]]}

    model = make(forward)
    module = trace(model, {"x": rows(), "y": rows(seed=1), "scale": 2.0}).to_module()
    a = model(rows(6), y=rows(6, seed=1), scale=2.0)
    b = module(rows(6), y=rows(6, seed=1), scale=2.0)
    assert torch.equal(a["z"], b["z"])
    assert b["y"][1:] == [None, 6]
    assert b["z"].requires_grad
    with torch.no_grad():
        assert not module(x=rows(), y=rows(), scale=2.0)["z"].requires_grad
    with pytest.raises(InputError, match=r"captured with 2\.0"):
        module(rows(), y=rows(), scale=3.0)
    with pytest.raises(InputError, match="missing"):
        module(rows(), scale=2.0)


def test_modes_of_the_module_do_not_reach_the_model() -> None:
    model = models.gpt(layers=1)
    module = trace(model, models.batch_for(model, 2)[0]).to_module()
    module.eval()
    assert all(part.training for part in model.modules())


def test_constants_and_other_models() -> None:
    scale = torch.arange(8.0)
    model = make(lambda self, x: self.lin(x) * scale)
    graph = trace(model, rows())
    other = make(lambda self, x: x)
    assert torch.equal(graph.to_module(other)(rows()), other.lin(rows()) * scale)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return gradient * x * 3


def test_custom_functions_keep_their_backward() -> None:
    model = make(lambda self, x: Tripled.apply(self.lin(x)) + Tripled.apply(x))
    assert_alike(model, trace(model, rows()).to_module(), rows(3))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_modules(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(getattr(nn.utils.parametrizations, name)(nn.Linear(8, 8)), nn.Tanh())
    module = trace(model, rows()).to_module()
    assert list(module.state_dict()) == list(model.state_dict())
    assert_alike(model, module, rows(3))


def test_modules_switched_apart_stay_so() -> None:
    parts = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    model = make(lambda self, x: self.parts(self.lin(x)), parts=parts)
    parts[2].eval()
    for training in (True, False):
        parts[0].train(training)
        module = trace(model, rows()).to_module()
        assert [m.training for m in module.parts] == [training, True, False]
        for mode in (True, False, True):
            module.train(mode)
            torch.manual_seed(1)
            found = module(rows(5))
            if not mode:
                model.eval()
            torch.manual_seed(1)
            assert torch.equal(found, model(rows(5)))
            model.train()
            parts[0].train(training)
            parts[2].eval()


def test_calls_that_were_not_captured_are_refused() -> None:
    def forward(self, x, y=None, *, scale=1.0):  # type: ignore[no-untyped-def]
        out = self.lin(x) * scale * x.shape[1]
        return out if y is None else out + y

    model = make(forward)
    module = trace(model, rows()).to_module()
    assert torch.equal(module(rows(3), None, scale=1.0), model(rows(3)))
    with pytest.raises(InputError, match="without this input") as caught:
        module(rows(), rows())
    assert caught.value.where == "y"
    with pytest.raises(InputError, match="without this input"):
        module(rows(), scale=2.0)
    with pytest.raises(InputError, match=r"int64 \(4, 8\), captured was float32 \(b, 8\)"):
        module(rows().long())
    with pytest.raises(InputError, match=r"captured was float32 \(b, 8\)"):
        module(rows()[:, None])
    both = trace(model, (rows(), rows()), batch_dims=0).to_module()
    with pytest.raises(InputError, match="has 3 samples, and others have 4"):
        both(rows(4), rows(3))
    passed = trace(model, {"x": rows(), "scale": 1.0}).to_module()
    assert torch.equal(passed(rows()), model(rows()))


def test_a_copy_is_a_module_of_its_own() -> None:
    model = models.gpt(layers=1)
    batch, _ = models.batch_for(model, 2)
    module = trace(model, batch).to_module()
    twin = copy.deepcopy(module)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert len(list(twin.parameters())) == len(list(model.parameters()))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    for training in (True, False):
        torch.manual_seed(0)
        expected = model.train(training)(batch)
        torch.manual_seed(0)
        assert torch.equal(twin.train(training)(batch), expected)
    assert module.training
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(twin(batch), model(batch))


def test_a_module_may_be_converted() -> None:
    model = make(lambda self, x: self.lin(x))
    module = trace(model, rows()).to_module().double()
    assert torch.equal(module(rows().double()), model.double()(rows().double()))


def test_sizes_with_which_the_model_is_another_are_refused() -> None:
    model = make(lambda self, x: self.lin(x) * min(len(x), 20))
    module = trace(model, rows()).to_module()
    with pytest.raises(InputError, match=r"for 1 to 17 samples, got 40: .*not linearly"):
        module(rows(40))
    model = make(lambda self, x: self.lin(x))
    with pytest.warns(UserWarning, match="for 1 to 120 samples, got 121, which was not tried"):
        assert torch.equal(trace(model, rows()).to_module()(rows(121)), model(rows(121)))


def test_a_graph_with_a_loss_computes_the_model() -> None:
    model = make(lambda self, x: self.lin(x))
    found = captured(model, loss_fn=F.mse_loss, target=rows(seed=1))
    assert torch.equal(found.train.to_module(model)(rows(3)), model(rows(3)))


def test_without_the_model_it_says_so() -> None:
    graph = trace(make(lambda self, x: self.lin(x)), rows())
    gc.collect()
    with pytest.raises(TraceError, match="is gone"):
        graph.to_module()


def test_a_graph_of_one_mode_refuses_the_other() -> None:
    model = make(lambda self, x: self.lin(x))
    found = captured(model)
    assert torch.equal(found.train.to_module(model).eval()(rows()), model(rows()))
    alone = OpGraph.from_json(found.train.to_json())
    object.__setattr__(alone, "output_spec", found.train.output_spec)
    module = alone.to_module(model)
    assert torch.equal(module(rows()), model(rows()))
    with pytest.raises(TraceError, match="only one mode"):
        module.eval()(rows())


def test_a_comparison_that_is_interrupted_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pdcompile.batch import flatten_call, resolve_batch

    model = models.mlp().eval()
    inputs, target = models.batch_for(model, 4)
    flat = flatten_call(model, (inputs,), {}, target)
    layout = resolve_batch(flat)
    found = capture(model, flat, layout, models.loss_for(model))

    def interrupted(*_: object, **__: object) -> None:
        assert model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(fidelity, "differing", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        fidelity.compare(model, found, flat, layout)
    assert not model.training, caught  # while somebody has the error
