"""Contents of captures: ops, values, facts; on the models that every test shares."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile.ir.graph import Affine, Attr, Ref, TorchLiteral, leaves, size_at
from pdcompile.passes.trace import trace
from tests.helpers import models
from tests.helpers.captures import captured, faithful, make, op_named, rows, targets


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet", "unet"])
def test_capture_equals_the_model_at_every_size(name: str) -> None:
    model = models.gpt(dropout=0.1, layers=2) if name == "gpt" else getattr(models, name)()
    inputs, target = models.batch_for(model, 4)
    faithful(model, inputs, loss_fn=models.loss_for(model), target=target)


def test_a_model_that_returns_its_loss() -> None:
    model = models.returns_loss(models.mlp(layers=2))
    found = faithful(model, *models.batch_for(model, 4))
    assert found.train.loss == "mse_loss"
    assert op_named(found, "mse_loss").region == "forward"


def test_ops_of_a_gpt() -> None:
    model = models.gpt(layers=1)
    found = captured(model, models.batch_for(model, 4)[0])
    wte = op_named(found, "wte")
    assert (wte.kind, wte.target, wte.module_path) == ("module", "torch.nn.Embedding", "wte")
    assert wte.constructor == (("num_embeddings", 64), ("embedding_dim", 32))
    assert wte.parameters == ("wte.weight",)
    assert op_named(found, "lm_head").parameters == ("wte.weight",)
    assert found.train.tensors["wte.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in found.train.tensors
    arange = op_named(found, "arange")
    assert dict(arange.kwargs)["device"] == TorchLiteral("device", "self")
    assert arange.variable == "positions"
    view = op_named(found, "view")
    assert (view.kind, view.module_path) == ("method", "blocks.0")
    assert view.args == (Ref("split_0"), Affine(1), 16, 4, 8)
    assert "tests/helpers/models.py:" in view.source
    assert found.train.values["view"].shape == (Affine(1), 16, 4, 8)
    assert found.train.values["split"].dtype == "container"
    split = {name: found.train.values[name].storage for name in ("split_0", "split_2", "view")}
    assert len(set(split.values())) == 1
    assert found.train.values["arange"].needs_gradient is False
    assert found.train.classes["blocks.0"][0].endswith("Block")


def test_source_of_a_leaf_is_the_line_of_its_caller() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.seq(x)

    found = captured(make(forward, seq=nn.Sequential(nn.Linear(8, 8), nn.ReLU())))
    lines = {op.source for op in found.train.ops}
    assert len(lines) == 1
    assert "test_trace.py:" in lines.pop()


def test_batch_norm_writes_its_statistics_in_train_mode_only() -> None:
    model = models.convnet()
    found = captured(model, models.batch_for(model, 4)[0])
    train = op_named(found, "bn1")
    assert set(train.buffers_written) == {
        "bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked",
    }  # fmt: skip
    evaluation = next(op for op in found.eval.ops if op.name == "bn1")
    assert evaluation.buffers_written == ()
    assert "bn1.running_mean" in evaluation.buffers_read
    assert "bn1" in found.train.notes[0]


def test_draws_are_counted_by_module_path() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.drop(F.dropout(x, 0.5, self.training))
        return self.drop(x + torch.rand_like(x))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output * torch.rand_like(output) - target).square().mean()

    found = faithful(make(forward, drop=nn.Dropout(0.2)), loss_fn=loss, target=rows(seed=1))
    for graph in (found.train, found.eval):
        draws = [(op.module_path, op.draw) for op in graph.ops if op.draw is not None]
        assert draws == [("", 0), ("drop", 0), ("", 1), ("drop", 1), ("loss_fn", 0)]


def test_loss_region() -> None:
    model = models.convnet()
    inputs, target = models.batch_for(model, 4)
    found = captured(model, inputs, loss_fn=models.class_loss, target=target)
    assert found.train.loss == "cross_entropy"
    assert [op.region for op in found.train.ops][-1] == "loss"
    assert [entry.path for entry in found.train.inputs] == ["images", "target"]
    assert op_named(found, "cross_entropy").module_path == "loss_fn"
    assert [op.name for op in found.train.ops] == [op.name for op in found.eval.ops]


def test_a_loss_module_with_weights_keeps_them_as_constants() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, 9.0), label_smoothing=0.1)
    target = torch.tensor([0, 1, 2, 3])
    found = faithful(make(lambda self, x: self.lin(x)), loss_fn=loss, target=target)
    info = found.train.tensors["loss_fn.weight"]
    assert (info.kind, info.persistent) == ("constant", False)
    assert found.train.tensor_values["loss_fn.weight"] is loss.weight


def test_values_that_need_a_gradient() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        frozen = self.frozen(x)
        used = self.lin(frozen)
        side = self.side(used)
        return used.sum() + side.detach().mean()

    frozen = nn.Linear(8, 8).requires_grad_(False)
    found = faithful(make(forward, frozen=frozen, side=nn.Linear(8, 2)))
    values = found.train.values
    needs = {name: values[name].needs_gradient for name in ("frozen", "lin", "side", "add")}
    assert needs == {"frozen": False, "lin": True, "side": False, "add": True}
    assert values["side"].requires_grad
    assert not values["frozen"].requires_grad


def test_a_gradient_that_passes_through_a_written_view_is_needed() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        base = torch.zeros(x.shape[0], 8)
        part = base[:, :4]
        part.add_(self.lin(x)[:, :4])
        return base.sum()

    found = faithful(make(forward))
    assert found.train.values["lin"].needs_gradient
    assert found.train.values["zeros"].requires_grad
    assert op_named(found, "iadd").mutates == ("getitem",)


def test_in_place_results_take_the_new_name() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.lin(x)
        h[:, 0] = 0.0
        torch.relu_(h)
        return h + 1

    found = faithful(make(forward))
    assert op_named(found, "setitem").mutates == ("lin",)
    assert op_named(found, "relu").mutates == ("lin",)
    assert op_named(found, "add").args == (Ref("relu"), 1)


def test_one_module_called_three_times() -> None:
    found = faithful(make(lambda self, x: self.lin(self.lin(self.lin(x)))))
    assert [(op.module_call, op.call_index) for op in found.train.ops] == [(0, 0), (1, 1), (2, 2)]


def test_dead_code_goes_but_draws_and_writes_stay() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        torch.rand(3)
        x.exp().sin()
        self.count += 1
        return self.lin(x)

    found = faithful(make(forward, count=torch.tensor(0)))
    assert targets(found) == ["rand", "iadd", "Linear"]


def test_regions_are_flags() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.lin(x).mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.lin(x) + self.lin(x)
        return y.float() * scale

    found = faithful(make(forward))
    mean, add = op_named(found, "mean"), op_named(found, "add")
    assert (mean.grad_enabled, mean.autocast) == (False, None)
    assert (add.grad_enabled, add.autocast) == (True, "cpu:bfloat16")
    assert found.train.values["add"].dtype == "bfloat16"


def test_an_ambient_autocast_of_the_caller_is_not_captured() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = captured(make(lambda self, x: self.lin(x)))
    assert found.train.values["lin"].dtype == "float32"
    assert found.train.ops[0].grad_enabled


class Doubled(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so that tracing through it shows."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 2

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * 3


def test_custom_autograd_function_is_one_op() -> None:
    found = faithful(make(lambda self, x: Doubled.apply(self.lin(x))))
    assert len(found.train.ops) == 2
    assert found.train.ops[1].target.endswith("test_trace.Doubled.apply")


def test_outputs_of_any_structure() -> None:
    def forward(self, x, *rest, scale=1.0, **more):  # type: ignore[no-untyped-def]
        return {"y": self.lin(x) * scale, "z": [None, more["mask"], (x, 3)], "n": rest[0]}

    mask, extra = torch.ones(4, dtype=torch.bool), torch.arange(4)
    found = faithful(make(forward), rows(), extra, scale=2.0, mask=mask)
    assert [str(type(leaf).__name__) for leaf in leaves(found.train.output)] == [
        "Ref", "NoneType", "Ref", "Ref", "int", "Ref",
    ]  # fmt: skip
    assert [entry.path for entry in found.train.inputs] == ["x", "rest[0]", "mask"]
    assert found.train.constants == (("scale", "2.0"),)


def test_loss_in_a_dict() -> None:
    def forward(self: nn.Module, x: Tensor) -> dict[str, Tensor]:
        y = self.lin(x)
        return {"logits": y, "loss": y.square().mean()}

    assert faithful(make(forward)).train.loss == "mean"


def test_containers_are_taken_apart() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        values, indices = self.lin(x).max(dim=1, keepdim=True)
        out, (hidden, _) = self.rnn(x[:, None])
        return values + indices + out[:, 0] + hidden[0] + x.chunk(2, 1)[1].sum()

    found = faithful(make(forward, rnn=nn.LSTM(8, 8, batch_first=True)))
    rnn = op_named(found, "rnn")
    assert rnn.constructor == (("input_size", 8), ("hidden_size", 8), ("batch_first", True))
    assert op_named(found, "rnn_1_0").args == (Ref("rnn_1"), 0)
    assert "chunk_0" not in found.train.values


def test_kinds_of_leaves() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.conv(mixed).flatten(1)

    attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    found = faithful(make(forward, attention=attention, conv=nn.Conv1d(3, 2, 3, padding="same")),
                     torch.randn(4, 3, 8))  # fmt: skip
    assert op_named(found, "attention").constructor == (
        ("embed_dim", 8), ("num_heads", 2), ("dropout", 0.1), ("batch_first", True),
    )  # fmt: skip
    assert op_named(found, "conv").constructor == (
        ("in_channels", 3), ("out_channels", 2), ("kernel_size", 3), ("padding", "same"),
    )  # fmt: skip


def test_what_is_no_plain_leaf_is_captured_inside() -> None:
    hooked = make(lambda self, x: self.lin(x))
    hooked.lin.register_forward_hook(lambda module, args, output: output * 2)
    assert targets(faithful(hooked)) == ["linear", "mul"]
    edited = make(lambda self, x: self.other(x), other=nn.Linear(8, 8, bias=False))
    edited.other.weight = nn.Parameter(torch.ones(4, 8))
    assert targets(faithful(edited)) == ["linear"]
    frozen = make(lambda self, x: self.norm(x), norm=nn.BatchNorm1d(8))
    frozen.norm.eval()
    assert targets(faithful(frozen)) == ["batch_norm"]


def test_unregistered_tensors_are_constants() -> None:
    scale = torch.arange(8.0)
    found = faithful(make(lambda self, x: self.lin(x) * scale))
    assert found.train.ops[1].args == (Ref("lin"), Attr("constant"))
    assert found.train.tensors["constant"].kind == "constant"
    assert found.train.tensor_values["constant"] is scale


def test_a_model_on_the_meta_device() -> None:
    model = make(lambda self, x: self.lin(x)).to("meta")
    found = captured(model, loss_fn=F.mse_loss, target=rows())
    assert found.train.values["lin"].shape == (Affine(1), 8)
    assert found.train.values["lin"].needs_gradient


def test_strides_of_channels_last() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.conv(x.to(memory_format=torch.channels_last))

    found = faithful(make(forward, conv=nn.Conv2d(3, 4, 3)), torch.randn(4, 3, 6, 6))
    assert found.train.values["to"].stride_order == (0, 2, 3, 1)


def test_dtypes() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = torch.complex(self.lin(x), x)
        return torch.view_as_real(z * z.conj()).sum(-1).double() + self.wide(x.double())

    found = faithful(make(forward, wide=nn.Linear(8, 8).double()))
    assert found.train.values["complex_1"].dtype == "complex64"
    assert dict(op_named(found, "wide").constructor)["dtype"] == TorchLiteral("dtype", "float64")


def test_checkpointed_regions_are_what_they_compute() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (True, False):

        def forward(self: nn.Module, x: Tensor, reentrant: bool = reentrant) -> Tensor:
            block = lambda t: F.dropout(self.lin(t), 0.3).relu()  # noqa: E731
            return checkpoint(block, self.lin(x), use_reentrant=reentrant)

        # Gradients for what a reentrant region reads are summed in it first.
        entry = ["view_as"] if reentrant else []
        found = faithful(make(forward))
        assert targets(found) == ["Linear", *entry, "Linear", "dropout", "relu"]


def test_values_of_constants_may_be_read() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        width = int(torch.tensor([2, 5]).max())
        mask = torch.ones(8, 8).tril() > 0
        if (mask == mask.tril()).all():
            x = x[:, :width]
        return self.lin(F.pad(x, (0, 8 - width)))

    found = faithful(make(forward))
    assert targets(found) == ["getitem", "pad", "Linear"]


def test_scripted_functions_are_what_their_source_says() -> None:
    assert targets(faithful(make(lambda self, x: _scripted(self.lin(x))))) == [
        "Linear", "mul", "add",
    ]  # fmt: skip


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return x * 2 + 1


def test_trace_captures_the_present_mode() -> None:
    model = models.gpt(layers=1)
    ids = models.batch_for(model, 4)[0]
    assert trace(model, ids).training
    assert not trace(model.eval(), ids).training
    assert not model.training


def test_sizes_follow_the_batch() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        steps = torch.zeros(2 * x.shape[0] + 1, 1, 8)
        return (self.lin(x)[None] + steps).sum(0) / x.shape[0]

    found = faithful(make(forward))
    assert found.train.values["zeros"].shape == (Affine(2, 1), 1, 8)
    assert op_named(found, "truediv").args[1] == Affine(1)
    assert [size_at(size, 5) for size in found.train.values["add"].shape] == [11, 5, 8]


def test_operators_of_python() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = -(self.lin(x) ** 2) / 3 + 2**x - abs(1 - x) * (4.0 / (x * x + 1)) // 2 % 5
        return torch.where((x > 0) & ~(x >= 1) | (x == 0.5), y @ self.lin.weight.T, 0.0 + y)

    assert {"pow", "neg", "truediv", "sub", "and_", "invert", "or_", "matmul"} <= set(
        targets(faithful(make(forward)))
    )


def test_devices_are_never_baked_in() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        a = torch.ones(8, device="cpu") + torch.ones(8, device=torch.device("cpu"))
        return self.lin(x).to(x.device) + a.to(device=self.lin.weight.device)

    found = faithful(make(forward))
    own = TorchLiteral("device", "self")
    for name in ("ones", "ones_1"):
        assert dict(op_named(found, name).kwargs)["device"] == own
    assert not {"to", "to_1"} & {op.name for op in found.train.ops}  # nothing to be done


def test_batch_size_of_the_capture_is_the_microbatch_size() -> None:
    found = captured(make(lambda self, x: self.lin(x)), rows(6), microbatch_size=3)
    assert found.train.batch_size == 3


def test_a_graph_can_be_sent_to_another_process() -> None:
    graph = captured(models.mlp(layers=2), rows(4, 16)).train
    assert pickle.loads(pickle.dumps(graph)) == graph
