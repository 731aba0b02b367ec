"""Sources of the values of a model on the meta device: files, a function, the model itself."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdcompile.errors import ConfigError
from pdcompile.weights.source import check, materialise, open_source, read, slots
from tests.helpers.checkpoints import (
    Bare,
    Net,
    equal,
    normal,
    on_meta,
    saved,
    sharded,
    state_of,
)


@pytest.mark.parametrize("layout", ["file", "folder", "sharded", "index", "list"])
def test_every_layout_gives_what_was_saved(tmp_path: Path, layout: str) -> None:
    eager = Net()
    state = state_of(eager)
    place: Any = {
        "file": lambda: saved(tmp_path, state),
        "folder": lambda: saved(tmp_path, state).parent,
        "sharded": lambda: sharded(tmp_path, state),
        "index": lambda: sharded(tmp_path, state) / "model.safetensors.index.json",
        "list": lambda: sorted(sharded(tmp_path, state).glob("*.safetensors")),
    }[layout]()
    model = on_meta()
    materialise(model, open_source(place))
    assert equal(model, eager)
    assert model.last.weight is model.first.weight
    assert isinstance(model.first.weight, nn.Parameter)
    memory = model.first.weight.untyped_storage()
    assert memory.nbytes() == 8 * 4 * 4  # of its own, not a piece of the file


@given(chosen=st.sets(st.sampled_from(sorted(slots(Net())))))
@settings(max_examples=20)
def test_a_subset_is_read_alone(tmp_path_factory: Any, chosen: set[str]) -> None:
    eager = Net()
    source = open_source(sharded(tmp_path_factory.mktemp("w"), state_of(eager)))
    model = on_meta()
    assert {fqn for fqn, _ in read(model, source, chosen)} == chosen
    assert all(slot.tensor.is_meta for slot in slots(model).values())
    assert set(materialise(model, source, chosen)) == chosen
    assert {fqn for fqn, slot in slots(model).items() if not slot.tensor.is_meta} == chosen


def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    eager = Net()
    state = state_of(eager)
    state["last.weight"] = state.pop("first.weight")
    model = on_meta()
    assert materialise(model, open_source(saved(tmp_path, state)), ["last.weight"]) == (
        "first.weight",
    )
    assert torch.equal(model.first.weight, eager.first.weight)


def test_names_of_one_tensor_with_unlike_values_are_refused(tmp_path: Path) -> None:
    state = state_of(Net())
    state["last.weight"] = state["first.weight"] + 1
    with pytest.raises(ConfigError, match="one tensor in the model, and differ"):
        materialise(on_meta(), open_source(saved(tmp_path, state)))


class _Live(TorchDispatchMode):
    """The most bytes in storages that were made here and were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                memory = leaf.untyped_storage()
                if id(memory) not in self.alive:
                    self.alive[id(memory)] = memory.nbytes()
                    weakref.finalize(memory, self.alive.pop, id(memory))
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def test_never_more_than_one_tensor_beyond_what_is_kept() -> None:
    def fill(name: str, tensor: Tensor) -> None:
        tensor.fill_(1.0)

    model = on_meta(lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))))
    with _Live() as live:
        for _, value in read(model, open_source(fill)):
            del value
    assert 64 * 64 * 4 <= live.peak < 2.5 * 64 * 64 * 4


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    state = state_of(Net())
    del state["norm.weight"], state["norm.running_mean"]
    state["head.weight"] = torch.zeros(2)
    source = open_source(saved(tmp_path, state))
    with pytest.raises(ConfigError) as caught:
        check(on_meta(), source)
    assert "2 of 6 parameters and buffers are missing" in str(caught.value)
    for name in ("norm.weight", "norm.running_mean", "head.weight"):
        assert name in str(caught.value)


def test_names_that_the_model_does_not_have_are_only_warned_of(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path, {**state_of(Net()), "head.weight": torch.zeros(2)}))
    with pytest.warns(RuntimeWarning, match=r"head\.weight"):
        check(on_meta(), source)


def test_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    place = saved(tmp_path, {**state_of(Net()), "norm.bias": torch.zeros(5)})
    with pytest.raises(ConfigError, match=r"norm\.bias has shape \(5,\).*expects \(4,\)") as caught:
        materialise(on_meta(), open_source(place))
    assert caught.value.where == str(place)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float16"),
        ("float64", "float32"),
        ("int64", "float32"),
    ],
)
def test_a_dtype_that_would_lose_digits_is_refused(
    tmp_path: Path, stored: str, wanted: str
) -> None:
    model = on_meta().to(getattr(torch, wanted))
    bias = torch.zeros(4).to(getattr(torch, stored))
    state = {**state_of(Net().to(getattr(torch, wanted))), "norm.bias": bias}
    with pytest.raises(ConfigError, match=rf"norm\.bias is {stored}.*expects {wanted}") as caught:
        materialise(model, open_source(saved(tmp_path, state)))
    assert f"model.to(torch.{stored})" in (caught.value.remedy or "")


def test_a_narrower_dtype_is_widened_exactly(tmp_path: Path) -> None:
    eager = Net().to(torch.bfloat16)
    model = on_meta()
    materialise(model, open_source(saved(tmp_path, state_of(eager))))
    assert model.first.weight.dtype == torch.float32
    assert torch.equal(model.first.weight, eager.first.weight.float())


def broken(folder: Path, kind: str) -> Path:
    place = saved(folder, state_of(Net()))
    match kind:
        case "not there":
            return folder / "other.safetensors"
        case "empty folder":
            (folder / "empty").mkdir()
            return folder / "empty"
        case "pickle":
            torch.save(state_of(Net()), folder / "model.pt")
            return folder / "model.pt"
        case "cut off":
            place.write_bytes(place.read_bytes()[:-8])
        case "garbage":
            place.write_bytes(b"\xff" * 64)
        case "no index":
            (folder / "model.safetensors.index.json").write_text("{")
            return folder
        case "index elsewhere":
            text = json.dumps({"weight_map": {"norm.bias": "../model.safetensors"}})
            (folder / "model.safetensors.index.json").write_text(text)
            return folder
        case "index of nothing":
            text = json.dumps({"weight_map": {"norm.bias": "gone.safetensors"}})
            (folder / "model.safetensors.index.json").write_text(text)
            return folder
    return place


@pytest.mark.parametrize(
    "kind",
    ["not there", "empty folder", "pickle", "cut off", "garbage", "no index", "index elsewhere",
     "index of nothing"],
)  # fmt: skip
def test_unreadable_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    place = broken(tmp_path, kind)
    with pytest.raises(ConfigError) as caught:
        open_source(place)
    assert str(place) in (caught.value.where or "")
    assert caught.value.remedy


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, {"norm.bias": torch.zeros(4)})
    index = dict.fromkeys(state_of(Net()), "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ConfigError, match=r"first\.weight cannot be read"):
        materialise(on_meta(), open_source(tmp_path), ["first.weight"])


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    places = [saved(tmp_path, {"norm.bias": torch.zeros(4)}, f"{n}.safetensors") for n in "ab"]
    with pytest.raises(ConfigError, match=r"norm\.bias is in two files"):
        open_source(places)


# A function.


def test_a_function_gives_every_subset_the_same_values() -> None:
    before = torch.random.get_rng_state()
    whole = dict(read(on_meta(), open_source(normal)))
    for fqn in whole:
        (found,) = [value for _, value in read(on_meta(), open_source(normal), [fqn])]
        assert torch.equal(found, whole[fqn])
    other = dict(read(on_meta(), open_source(normal, seed=1), ["first.weight"]))
    assert not torch.equal(other["first.weight"], whole["first.weight"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_function_that_leaves_something_out_is_refused() -> None:
    def half(name: str, tensor: Tensor) -> None:
        tensor.view(-1)[1:] = 0

    for name in ("first.weight", "norm.running_var"):
        with pytest.raises(ConfigError, match=rf"leaves {re.escape(name)} .*without values"):
            materialise(on_meta(), open_source(half), [name])

    def integers(name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            tensor.zero_()

    with pytest.raises(ConfigError, match=r"leaves norm\.num_batches_tracked"):
        materialise(on_meta(), open_source(integers))


def test_a_function_that_raises_is_quoted_with_the_tensor() -> None:
    def fails(name: str, tensor: Tensor) -> None:
        raise KeyError(name)

    with pytest.raises(ConfigError, match="fails: KeyError") as caught:
        materialise(on_meta(), open_source(fails))
    assert caught.value.where == "first.weight"


def test_files_come_before_the_function_beside_them(tmp_path: Path) -> None:
    eager = Net()
    state = state_of(eager)
    del state["first.weight"]
    source = open_source([saved(tmp_path, state), normal])
    model = on_meta()
    with pytest.warns(RuntimeWarning, match=r"left to the function: first\.weight"):
        check(model, source)
    materialise(model, source)
    assert torch.equal(model.norm.weight, eager.norm.weight)
    assert not model.first.weight.is_meta


@pytest.mark.parametrize(
    ("given", "message"),
    [(3, "not a source of weights"), ([], "not a source of weights"),
     ({}, "not a source of weights"),
     ([normal, normal], "not a source of weights"), (lambda module: None, "cannot be called with")],
)  # fmt: skip
def test_what_is_no_source_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_source(given)
    assert caught.value.remedy


def test_a_function_for_a_model_with_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="every tensor of the model has its values"):
        check(Net(), open_source(normal))


def test_values_of_a_checkpoint_are_written_over_those_of_a_model(tmp_path: Path) -> None:
    eager, model = Net(), Net(Bare())
    weight = model.first.weight
    materialise(model, open_source(saved(tmp_path, state_of(eager))))
    assert model.first.weight is weight
    assert torch.equal(weight, eager.first.weight)
    assert torch.equal(model.inner.mask, torch.ones(3, 3).tril())
