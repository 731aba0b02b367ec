"""Captures that later commands use: alike where nothing changed, never for a model that did."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import xxhash
from torch import Tensor, nn

from pdcompile.batch import example_call, resolve_batch
from pdcompile.files import VARIABLE, capture_beside, drop_oldest
from pdcompile.ir.graph import Capture
from pdcompile.passes.trace.kept import capture_cache, capture_record
from pdcompile.passes.trace.kept.capture_cache import forget, kept_or_captured
from pdcompile.passes.trace.kept.capture_record import (
    SourceFile,
    from_bytes,
    loaded_files,
    to_bytes,
)
from pdcompile.passes.trace.kept.description import Undescribed, described
from pdcompile.passes.trace.kept.structure_record import NotWritten, from_record, to_record
from pdcompile.passes.trace.subject import CaptureCall

SCALE = 2.0


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Output(NamedTuple):
    y: Tensor
    parts: list[Tensor]


class Holder:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class Model(nn.Module):
    factor = 1.0

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.steps = {"a": 3}
        self.register_buffer("table", torch.tensor([2, 1]))

    def forward(self, x: Tensor) -> Any:
        for _ in range(self.steps["a"]):
            x = helper(self.lin(x)) * self.factor
        return {"out": Output(self.drop(x), [x.sum()]), "held": Holder(x.mean())}


class ByNumber(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * int(self.table[0])


class ByValue(Model):
    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        if flag.any():
            raise ValueError("flagged")
        return self.lin(x)


def loss(output: Any, target: Tensor) -> Tensor:
    return (output["held"].y - target.mean()) ** 2


class Calls:
    """Captures of models, with what was said of each, and whether it was made anew."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, model: nn.Module, *inputs: Tensor, **options: Any) -> Capture:
        flat = example_call(model, inputs or (torch.ones(4, 4),), options.get("target"))
        call = CaptureCall(
            model, flat, resolve_batch(flat, 0), options.get("loss"), options.get("size", 2),
            options.get("autocast"),
        )  # fmt: skip
        self.said.clear()
        return kept_or_captured(call, self.said.append, options.get("beside"))


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(capture_cache, "LEAST_SECONDS", 0.0)
    # Other tests of this process have written modules since it began.
    monkeypatch.setattr(capture_record, "started_ns", time.time_ns)
    return Calls()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*.capture.json"))


def test_a_second_process_would_use_it(capture: Calls, tmp_path: Path) -> None:
    first = capture(Model(), target=torch.ones(4), loss=loss)
    assert (first.kept, capture.said) == ("", [])
    model = Model()
    again = capture(model, target=torch.zeros(4), loss=loss)
    (path,) = files(tmp_path)
    assert again.kept == str(path)
    assert "--no-cache" in capture.said[0]
    assert str(path) in capture.said[0]
    assert again == first
    for one, other in ((again.train, first.train), (again.eval, first.eval)):
        assert one.output_spec == other.output_spec
        assert one.sizes == other.sizes
        assert one.origin.model() is model
        assert one.origin.loss_fn is loss
    assert again.train.to_module()(torch.ones(4, 4))["held"].y.shape == ()


def changed_config(model: Model, _: Any) -> None:
    model.steps["a"] = 2


def changed_dtype(model: Model, _: Any) -> None:
    model.double()


def frozen(model: Model, _: Any) -> None:
    model.lin.weight.requires_grad_(False)


def tied(model: Model, _: Any) -> None:
    model.other = model.lin


def in_evaluation(model: Model, _: Any) -> None:
    model.drop.eval()


def hooked(model: Model, _: Any) -> None:
    model.lin.register_forward_hook(lambda module, args, output: output + 1)


def another_global(_: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)


def another_helper(_: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda x: x + 1)


def another_class_attribute(_: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "factor", 5.0)


def another_forward(_: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "forward", lambda self, x: {"held": Holder(self.lin(x).mean())})


def patched_torch(_: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight)


def another_default_dtype(_: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_default_dtype()
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert before is torch.float32


CHANGES = (
    changed_config, changed_dtype, frozen, tied, in_evaluation, hooked, another_global,
    another_helper, another_class_attribute, another_forward, patched_torch, another_default_dtype,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_forward_depends_on_is_described(
    change: Callable[[Model, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert described(Model(), loss) == described(Model(), loss)
    model, before = Model(), described(Model(), loss)
    change(model, monkeypatch)
    assert described(model, loss) != before


def test_closures_defaults_and_the_loss_are_described() -> None:
    def made(factor: float) -> Callable[..., Any]:
        return lambda output, target, power=2: (output - target) ** power * factor

    def other(output: Any, target: Any, power: int = 3) -> Any:
        return (output - target) ** power

    assert described(made(1.0)) == described(made(1.0))
    assert len({described(one) for one in (made(1.0), made(2.0), other)}) == 3


def test_the_values_of_weights_and_unused_globals_do_not_count() -> None:
    model = Model()
    before = described(model)
    with torch.no_grad():
        model.lin.weight.zero_()
    assert described(model) == before


def test_what_cannot_be_described_is_captured_again(capture: Calls, tmp_path: Path) -> None:
    model = Model()
    model.odd = xxhash.xxh64()  # made in C, and its state shows nowhere
    with pytest.raises(Undescribed, match="xxh64"):
        described(model)
    for _ in range(2):
        assert capture(model).kept == ""
        assert "cannot be told" in capture.said[0]
        assert "xxh64" in capture.said[0]
    assert files(tmp_path) == []


def test_the_call_counts(capture: Calls) -> None:
    assert capture(Model()).kept == ""
    assert capture(Model(), torch.zeros(4, 4)).kept  # other values alone
    assert not capture(Model(), torch.ones(8, 4)).kept
    assert not capture(Model(), size=1).kept
    assert not capture(Model(), autocast="cpu:bfloat16").kept
    assert not capture(Model(), torch.ones(4, 4, requires_grad=True)).kept
    assert capture(Model()).kept


def test_numbers_of_buffers_count(capture: Calls, tmp_path: Path) -> None:
    assert not capture(ByNumber()).kept
    assert capture(ByNumber()).kept
    other = ByNumber()
    other.table[0] = 5
    found = capture(other)
    assert not found.kept
    assert capture(other).kept
    assert capture(other).train == found.train


def test_values_of_the_example_count_where_they_were_looked_at(capture: Calls) -> None:
    inputs = torch.ones(4, 4), torch.zeros(4, dtype=torch.bool)
    assert capture(ByValue(), *inputs).by_values
    assert capture(ByValue(), *inputs).kept
    assert not capture(ByValue(), torch.zeros(4, 4), inputs[1]).kept


def test_an_edited_file_is_noticed(
    capture: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "lib.py"
    source.write_text("x = 1")
    state = source.stat()
    one = SourceFile(str(source), state.st_size, state.st_mtime_ns)
    monkeypatch.setattr(capture_cache, "loaded_files", lambda: (one,))
    monkeypatch.setattr(capture_cache, "changed_since_start", lambda files: None)
    capture(Model())
    assert capture(Model()).kept
    os.utime(source, ns=(1, 1))
    assert not capture(Model()).kept
    source.unlink()
    assert not capture(Model()).kept


def test_a_file_that_was_edited_meanwhile_keeps_the_capture_from_others(
    capture: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert __file__ in {one.path for one in loaded_files()}
    late = SourceFile(str(tmp_path / "lib.py"), 1, 2**62)
    monkeypatch.setattr(capture_cache, "loaded_files", lambda: (late,))
    assert not capture(Model()).kept
    assert "lib.py was changed while this process ran" in capture.said[0]
    assert files(tmp_path) == []


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + len(str(x.sum().item())) * 0)


def test_an_opaque_module_is_not_kept(capture: Calls, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Opaque())
    with pytest.warns(UserWarning, match="opaque"):
        assert not capture(model).kept
    assert "the module 1 is opaque" in capture.said[0]
    assert files(tmp_path) == []


def test_a_tensor_that_is_no_buffer_is_not_kept(capture: Calls, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].plain = torch.ones(4)
    model.forward = lambda x: model[0](x) * model[0].plain
    capture(model)
    assert "no parameter or buffer" in capture.said[0]
    assert files(tmp_path) == []


def test_quick_captures_and_a_cache_that_is_off_leave_no_file(
    capture: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_cache, "LEAST_SECONDS", 1000.0)
    assert not capture(Model()).kept
    monkeypatch.setenv(VARIABLE, "off")
    monkeypatch.setattr(capture_cache, "LEAST_SECONDS", 0.0)
    assert not capture(Model()).kept
    assert (files(tmp_path), capture.said) == ([], [])


def test_a_place_that_cannot_be_written_is_told(
    capture: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    assert not capture(Model()).kept
    assert "the capture is not kept for the next command" in capture.said[0]


def test_beside_a_plan(capture: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    beside = capture_beside(tmp_path / "plan.json")
    assert beside.name == "plan.capture.json"
    assert not capture(Model(), beside=beside).kept
    assert capture(Model(), beside=beside).kept == str(beside)
    assert not capture(Model(), torch.ones(8, 4), beside=beside).kept  # and takes its place
    assert not capture(Model(), beside=beside).kept


def test_a_capture_that_was_found_wrong_is_forgotten(capture: Calls, tmp_path: Path) -> None:
    capture(Model())
    found = capture(Model())
    forget(found)
    forget(found)
    assert files(tmp_path) == []


def test_warnings_are_shown_again(capture: Calls) -> None:
    class Decides(Model):
        def forward(self, x: Tensor, flag: Tensor) -> Tensor:
            return self.lin(x) if flag.any() else self.lin(x) * 2

    inputs = torch.ones(4, 4), torch.ones(4, dtype=torch.bool)
    model = Decides()
    for _ in range(2):
        with pytest.warns(UserWarning, match="forward decides by a value of the inputs"):
            found = capture(model, *inputs)
    assert found.kept


def mutants(data: dict[str, Any]) -> list[Any]:
    def changed(**parts: Any) -> dict[str, Any]:
        return {**data, **parts}

    graph = data["train"]
    return [
        [], {}, changed(header=[]), changed(header={**data["header"], "schema": "x/1"}),
        changed(attributes=3), changed(numbers=[1]), changed(by_values="yes"), changed(train=None),
        changed(train={**graph, "graph": {}}), changed(train={**graph, "sizes": []}),
        changed(train={**graph, "output": {"spec": 3, "parts": []}}), changed(eval=5),
    ]  # fmt: skip


def test_a_damaged_file_is_captured_again(capture: Calls, tmp_path: Path) -> None:
    capture(Model())
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for text in [b"", b"{", b"\xff", whole[:-20], *(
        json.dumps(one).encode() for one in mutants(json.loads(whole))
    )]:  # fmt: skip
        path.write_bytes(text)
        assert not capture(Model()).kept
        assert path.read_bytes() != text  # written anew
    assert capture(Model()).kept


@pytest.mark.parametrize(
    "part",
    [
        {"instance": "os:system", "number": 0, "base": "object", "keys": [], "attributes": [],
         "content": {"spec": None, "parts": [None]}},
        {"instance": "subprocess:Popen", "number": 0, "base": "object", "keys": [],
         "attributes": [], "content": {"spec": None, "parts": [None]}},
        {"instance": "not_imported_here:Thing", "number": 0, "base": "object", "keys": [],
         "attributes": [], "content": {"spec": None, "parts": [None]}},
        {"constant": "builtins:eval", "known": True}, {"constant": 3, "known": True}, 7, "x",
    ],
)  # fmt: skip
def test_only_loaded_classes_that_do_nothing_are_rebuilt(part: Any) -> None:
    with pytest.raises(NotWritten):
        from_record({"spec": None, "parts": [part]})
    assert "not_imported_here" not in sys.modules


def test_what_has_no_name_is_not_written() -> None:
    from pdcompile.batch import flatten_output

    class Local:
        def __init__(self) -> None:
            self.y = torch.ones(1)

    for value in (Local(), {1j: torch.ones(1)}, {"f": len, "x": torch.ones(1)}):
        with pytest.raises(NotWritten):
            to_record(flatten_output(value)[1])


def test_the_file_reads_back_as_it_was_written(capture: Calls, tmp_path: Path) -> None:
    capture(Model())
    (path,) = files(tmp_path)
    header, found = from_bytes(path.read_bytes(), "x")
    assert to_bytes(header, found) == path.read_bytes()


def test_files_that_were_used_longest_ago_are_dropped(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "older")):
        path = tmp_path / f"{name}.capture.json"
        path.write_bytes(b"x" * 10)
        os.utime(path, (1000 - age, 1000 - age))
    drop_oldest(tmp_path, "*.capture.json", most_bytes=25)
    assert sorted(path.name[:3] for path in tmp_path.iterdir()) == ["new", "old"]
    drop_oldest(tmp_path, "*.capture.json", most_bytes=0)
    assert list(tmp_path.iterdir()) == []
