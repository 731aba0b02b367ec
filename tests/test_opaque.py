"""Modules that cannot be captured inside are opaque, and train as in eager, bit for bit."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdcompile
from pdcompile.errors import ContractError, TraceError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.codegen import generate
from tests.helpers import generated
from tests.helpers.captures import captured, faithful, make, rows
from tests.helpers.cuts import cut
from tests.helpers.generated import mean_square


class Router(nn.Module):
    """Rows above zero go through another layer; counts them, draws three times."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(8, 8)
        self.all = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        chosen = (x[:, 0] > 0).nonzero().flatten()
        self.count += chosen.numel() % 3
        some = torch.zeros_like(x).index_add(0, chosen, self.drop(self.few(x[chosen])))
        every = checkpoint(self._every, x, use_reentrant=False)
        return some + every + torch.rand_like(x), {"sums": x.sum(1), "aux": None}

    def _every(self, x: Tensor) -> Tensor:
        return torch.dropout(self.all(x), 0.3, self.training)


class Routed(nn.Module):
    """Two routers, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.first = Router()
        self.second = Router()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x, extra = self.first(self.lin(x))
        x, _ = self.second(x + extra["sums"][:, None])
        x, _ = self.second(x)
        return self.head(x)  # type: ignore[no-any-return]


class Once(nn.Module):
    """One router, called once: an opaque module that is captured in less time."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.first, self.head = nn.Linear(8, 8), Router(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(self.lin(x))[0])  # type: ignore[no-any-return]


def routed(build: type[Any] = Routed) -> Any:
    torch.manual_seed(0)
    return build()


pytestmark = pytest.mark.filterwarnings("ignore:captured as opaque")


@pytest.mark.slow
def test_one_op_with_a_warning_that_says_why() -> None:
    with pytest.warns(UserWarning, match=r"'first' .*Router.*nonzero.*test_opaque.py"):
        graph = captured(routed()).train
    kept = [op for op in graph.ops if op.opaque]
    assert [op.module_path for op in kept] == ["first", "second", "second"]
    assert kept[0].buffers_written == ("first.count",)
    names = ("few.weight", "few.bias", "all.weight", "all.bias")
    assert kept[0].parameters == tuple(f"first.{name}" for name in names)
    assert kept[0].returns == "tuple(*, dict(sums=*, aux=None))"
    assert kept[0].flops
    assert kept[0].saved_bytes is not None
    assert OpGraph.from_json(graph.to_json()).ops == graph.ops


@pytest.mark.slow
def test_graph_and_stages_equal_eager() -> None:
    """Graph and three stages compute what eager does."""
    faithful(routed())
    generated.check(routed(), rows(), [1, 7], rows(seed=1), mean_square)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "2bw"])
def test_trains_as_the_reference(schedule: str) -> None:
    model = routed()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {
        "loss_fn": mean_square, "optimizer": partial(torch.optim.AdamW, lr=1e-2), "stages": 2,
        "microbatches": 4, "schedule": schedule, "cluster": pdcompile.Cluster.local(2),
        "costs": "estimated",
    }  # fmt: skip
    pipe, reference = pdcompile.compile(model, **options), pdcompile.reference(twin, **options)
    for seed in range(3):
        batch, target = rows(8, seed=seed), rows(8, seed=seed + 10)
        ours, theirs = pipe.step(batch, target=target), reference.step(batch, target=target)
        assert float(ours.loss) == float(theirs.loss)
    pipe.flush()
    reference.flush()
    state = pipe.full_state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in twin.state_dict().items())
    assert torch.equal(pipe.predict(rows()), reference.predict(rows()))
    assert type(model.first) is Router


def test_a_source_alone_says_what_it_needs() -> None:
    found = generated.captured(routed(Once), rows(), rows(seed=1), mean_square)[2]
    text = generate(found, cut(found, [1])).files["stage_1.py"]
    assert "# needs: tests.test_opaque.Router" in text
    namespace: dict[str, Any] = {"__name__": "alone"}
    exec(compile(text, "stage_1.py", "exec"), namespace)
    with pytest.raises(NotImplementedError, match=r"the model's own tests\.test_opaque\.Router"):
        namespace["Stage1"]().first(rows())


class Grows(nn.Module):
    """Returns as many rows as are above zero, filled up to 6 while `even`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        filled = torch.cat([chosen, x.new_zeros(len(x), 8)])[: max(len(x), len(chosen) + 1)]
        return self.lin(filled)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_result_of_another_shape_is_noticed() -> None:
    model = make(lambda self, x: self.part(self.lin(x)) * 2, part=Grows())
    sample = rows().abs() * 0
    with torch.no_grad():
        model.lin.weight.copy_(torch.eye(8))
        model.lin.bias.zero_()
    pipe = pdcompile.compile(model, optimizer=None, stages=1, microbatches=1, loss_fn=mean_square,
                             costs="estimated")  # fmt: skip
    pipe.step(sample, target=rows(seed=1))
    with pytest.raises(ContractError, match="opaque module 'part' returned float32 "):
        pipe.step(rows().abs(), target=rows(seed=1))


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Any:
        chosen = x[x[:, 0] > 0]  # its shape depends on values: no cut may follow
        return chosen.view(chosen.shape[0] * 8)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.inner(x).sum()


def test_the_caller_is_kept_where_the_module_itself_cannot_be() -> None:
    model = make(lambda self, x: self.part(self.lin(x)) * 2, part=Outer())
    found = faithful(model)
    assert [op.module_path for op in found.train.ops if op.opaque] == ["part"]


@pytest.mark.slow
def test_a_root_is_never_kept() -> None:
    with pytest.raises(TraceError, match="nonzero") as caught:
        captured(make(lambda self, x: self.lin(x).nonzero()))
    assert caught.value.where is not None
    with pytest.raises(TraceError, match="depends on values"):
        captured(make(lambda self, x: self.inner(x).sum() + self.lin(x), inner=Inner()))


@pytest.mark.slow
def test_on_the_meta_device_there_is_nothing_to_run() -> None:
    with pytest.raises(TraceError, match="nonzero") as caught:
        captured(routed().to("meta"))
    assert "on the meta device" in (caught.value.remedy or "")


class SetsUp(nn.Module):
    """Reads values, and keeps the width of what it gets first, or the number of its calls."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.known = 0

    def forward(self, x: Tensor) -> Tensor:
        self.known = self.known + 1 if self.counts else x.shape[1]
        return x * float(x.detach().numpy().mean()) / self.known


def test_what_an_opaque_module_sets_up_in_its_first_call_is_no_change_by_every_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.part(self.lin(x))  # type: ignore[no-any-return]

    model = make(forward, part=SetsUp(counts=False))
    assert [op.target for op in faithful(model).train.ops if op.opaque]
    assert model.part.known == 0
    with pytest.raises(TraceError, match=r"changes the Python attribute part\.known"):
        captured(make(forward, part=SetsUp(counts=True)))


class Pair(NamedTuple):
    """Two results."""

    view: Tensor
    twice: Tensor


class ViewOf(nn.Module):
    """Reads a value, and returns a part of its argument, in a class of its own."""

    def forward(self, x: Tensor) -> Pair:
        factor = 2 if float(x.detach().numpy().sum()) > -1e9 else 3
        return Pair(x[:, :4], x * factor)


class Slopes(nn.Module):
    """Reads a value, and takes gradients by a transform."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if float(x.detach().numpy().sum()) > -1e9 else 3
        return torch.func.vmap(torch.func.grad(lambda row: (row**2).sum()))(x) * factor


def test_results_of_other_classes_that_share_memory_and_transforms_inside() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first, second = self.part(self.lin(x))
        return self.slopes(second).sum(1, keepdim=True) + first

    model = make(forward, part=ViewOf(), slopes=Slopes())
    found = faithful(model)
    assert [op.module_path for op in found.train.ops if op.opaque] == ["part", "slopes"]
    view = next(value for value in found.train.values.values() if value.shape[-1:] == (4,))
    linear = next(op.name for op in found.train.ops if op.module_path == "lin")
    assert view.storage == found.train.values[linear].storage


class Ensemble(nn.Module):
    """Runs one module with the weights of several at once."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        every = [dict(member.named_parameters()) for member in self.members]
        stacked = {name: torch.stack([each[name] for each in every]) for name in every[0]}
        call = partial(torch.func.functional_call, self.members[0])
        return torch.vmap(lambda weights: call(weights, (x,)))(stacked).mean(0)


def test_weights_that_a_transform_gives_to_a_module_make_its_caller_opaque() -> None:
    model = make(lambda self, x: self.lin(self.part(x)), part=Ensemble())
    assert [op.module_path for op in faithful(model).train.ops if op.opaque] == ["part"]


class Balances(nn.Module):
    """An expert that leaves a loss of its own, with a gradient, in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.lin = nn.Linear(8, 8)
        if "buffer" in way:
            self.register_buffer("aux", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Any:
        y = self.lin(x)
        if "opaque" in self.way and (y > 100).any():
            y = y * 2
        aux = (y**2).mean()
        if "returned" in self.way:
            return y, aux
        if "in place" in self.way:
            self.aux.copy_(aux.detach() if "detached" in self.way else aux)
        else:
            self.aux = aux
        return y


def _balanced(self: Any, x: Tensor) -> Tensor:
    y = self.part(self.lin(x))
    if "returned" in self.part.way:
        return y[0] + y[1]  # type: ignore[no-any-return]
    return y + self.part.aux  # type: ignore[no-any-return]


def test_a_loss_that_an_opaque_module_leaves_behind_is_refused() -> None:
    model = make(_balanced, part=Balances("opaque"))
    with pytest.raises(TraceError, match=r"changes the Python attribute part\.aux") as caught:
        captured(model)
    assert "return out, aux" in (caught.value.remedy or "")
    file, number = (caught.value.where or "").split(":")
    assert file.endswith("test_opaque.py")
    assert "self.aux = aux" in Path(__file__).read_text().splitlines()[int(number) - 1]


@pytest.mark.parametrize("way", ["opaque returned", "", "buffer in place detached"])
def test_a_loss_that_is_returned_or_set_where_nothing_is_opaque(way: str) -> None:
    faithful(make(_balanced, part=Balances(way)))


def test_a_buffer_of_an_opaque_module_is_read_outside() -> None:
    """The stand-in for the module, where ops are compared, has its tensors."""
    model = make(_balanced, part=Balances("opaque buffer in place detached"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdcompile.compile(
            model, torch.randn(4, 8), example_target=torch.randn(4, 8), microbatches=2,
            loss_fn=nn.functional.mse_loss, cluster=pdcompile.Cluster.local(2), costs="estimated",
        )  # fmt: skip
    assert not [one for one in caught if "report this model" in str(one.message)]


class Ranges(nn.Module):
    """Follows the least value of what it gets, in a buffer that it binds anew or writes in place,
    in calls that a value decides about."""

    least: Any
    calls: Any

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("least", torch.zeros(1) - 1e-5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.least if self.way == "anew" else self.least.clone()  # by the graph
        y, least = x * kept, x.detach().min() * 0.05
        self.calls += 1
        if not self.training or ("rarely" in self.way and self.calls % 4 < 3):
            return y  # type: ignore[no-any-return]
        if float(x.detach().sum()) > -1e9:
            match self.way.rpartition(" ")[-1]:
                case "anew":
                    self.least = self.least * 0.95 + least
                case "longer":
                    self.least = self.least.repeat(2)
                case "wider":
                    self.least = self.least.double()
                case "gradient":
                    self.least = self.least + x.min()
                case "None":
                    self.least = None
                case _:
                    self.least.mul_(0.95).add_(least)
        return y  # type: ignore[no-any-return]


def ranging(way: str) -> Any:
    return make(lambda self, x: self.part(self.lin(x)) * 2, part=Ranges(way))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", ["anew", "rarely anew", "rarely in place"])
def test_buffers_are_as_in_eager_when_bound_anew_or_written_in_some_calls_only(
    way: str, recompute: bool
) -> None:
    model = ranging(way)
    twin = copy.deepcopy(model)
    pipe = pdcompile.compile(
        model, rows(8), example_target=rows(8), optimizer=partial(torch.optim.SGD, lr=0.0),
        loss_fn=mean_square, stages=1, microbatches=2, recompute=recompute, costs="estimated",
    )  # fmt: skip
    for seed in range(4):
        batch = rows(8, seed=seed)
        pipe.step(batch, target=rows(8))
        for part in batch.chunk(2):
            twin(part)
    state = pipe.full_state_dict()
    assert float(twin.part.least) != float(ranging(way).part.least)
    assert all(torch.equal(state[name], tensor) for name, tensor in twin.state_dict().items())


@pytest.mark.parametrize("way", ["longer", "wider", "gradient", "None"])
def test_what_cannot_be_written_into_a_buffer_is_not_bound_to_its_name(way: str) -> None:
    with pytest.raises(TraceError, match=r"rebinds part\.least to a new tensor"):
        captured(ranging(way))
    pipe = pdcompile.compile(
        ranging(f"rarely {way}"), rows(8), example_target=rows(8), optimizer=None,
        loss_fn=mean_square, stages=1, microbatches=2, costs="estimated",
    )  # fmt: skip
    pipe.step(rows(8), target=rows(8))
    with pytest.raises(ContractError, match=r"'part' binds its buffer 'least' to another tensor"):
        pipe.step(rows(8), target=rows(8))
