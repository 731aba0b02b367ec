"""Every error has a code, and a section of docs/errors.md with a message as it is really said."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile import errors
from pdcompile.cluster import Cluster
from pdcompile.errors import PdcompileError
from pdcompile.passes.profile import Profile
from pdcompile.passes.verify import verify
from pdcompile.plan import Plan
from pdcompile.runtime.failure.first_cause import Failures
from pdcompile.runtime.transport.contract import Channel, Expected, read_note
from pdcompile.runtime.transport.links import PeerLost
from pdcompile.schedule import Kind
from pdcompile.schedule.written import read as read_schedule
from tests.helpers import models
from tests.helpers.cuts import cut
from tests.helpers.graphs import chain
from tests.helpers.planned import planned
from tests.test_enough import refusal
from tests.test_runtime_exit_hooks import Store
from tests.test_runtime_messages import header
from tests.test_verify import captured, edited

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text(encoding="utf-8")
CLASSES = [
    one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, PdcompileError)
]
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def test_every_error_can_be_imported_from_the_package() -> None:
    assert {one.__name__ for one in CLASSES} - {*pdcompile.__all__} == set()


def pipe_of(model: nn.Module | None = None, **options: Any) -> Any:
    settings = {"loss_fn": F.mse_loss, "costs": "estimated", "microbatches": 2, "stages": 2}
    return pdcompile.compile(model or models.mlp(), **settings | options)  # type: ignore[arg-type]


X = torch.zeros(4, 16)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * x.max().item()


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(torch.log(x))


def another_width(_: Path, __: Any) -> None:
    pipe_of().prepare(X, target=X).step(X[:, :15], target=X)


def changed_stage(*_: Any) -> None:
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(linear)", "torch.relu(y)")
    verify(found, plan, sources, model, flat, layout, models.square_loss)


def tight(*_: Any) -> None:
    graph = chain(2, 256)
    free = planned(graph, Cluster.local(2), schedule="2bw").forecast
    assert free is not None
    raise refusal(graph, max(ledger.total_bytes for ledger in free.ledgers) - 1, 2, "2bw")


def written(text: str) -> Callable[[Path, Any], Any]:
    def read(folder: Path, _: Any) -> None:
        (folder / "mine.csv").write_text(text)
        read_schedule(folder / "mine.csv")

    return read


def damaged(folder: Path, _: Any) -> None:
    pipe = pipe_of().prepare(X, target=X)
    pipe.save(folder)
    (shard,) = folder.glob("*/stage-001.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    pipe.load(folder)


def edited_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    pipe_of().prepare(X, target=X).dump(folder / "stages")
    file = folder / "stages" / "stage_1.py"
    file.write_text(file.read_text() + "\n# mine\n")
    pipe_of(sources="stages").prepare(X, target=X)


def closed(*_: Any) -> None:
    pipe = pipe_of().prepare(X, target=X)
    pipe.close()
    pipe.step(X, target=X)


def half_of_torchrun(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    pipe_of().prepare(X, target=X)


def unlike_ranks(*_: Any) -> None:
    expected = Expected((2, 3), torch.float32, 7)
    read_note(Channel(Kind.VALUE, 3, 1), header(shape=(3, 3)), expected, 99)


def lost(*_: Any) -> None:
    store = Store()
    Failures(store, 1, 2).report("rank 1, stage 1, forward of minibatch 3, microbatch 0: "
                                 "IndexError: index out of range in self")  # fmt: skip
    raise Failures(store, 0, 2).cause(PeerLost(1, "connection closed by peer"), "stage 0")


PROVOKED: dict[str, Callable[[Path, Any], Any]] = {
    "PDC-CONFIG": lambda *_: pipe_of(stages=0),
    "PDC-INPUT": another_width,
    "PDC-TRACE": lambda *_: pipe_of(Gate()).prepare(X, target=X),
    "PDC-VERIFY": changed_stage,
    "PDC-COST": lambda *_: pipe_of(costs=Profile(torch.__version__, "cpu", 4, ())).prepare(
        X, target=X
    ),
    "PDC-CLUSTER": lambda *_: Cluster.from_toml("[[devices]]\ncount = 2\nmemory = '80 apples'\n"),
    "PDC-PLAN": lambda *_: Plan.from_json('{"schema": "pdcompile.plan/5", '),
    "PDC-INFEASIBLE": lambda *_: pipe_of(stages=50).prepare(X, target=X),
    "PDC-NOTFOUND": tight,
    "PDC-SCHEDULE": written("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n"),
    "PDC-DEADLOCK": written("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"),
    "PDC-SOURCE": edited_folder,
    "PDC-CHECKPOINT": damaged,
    "PDC-NONFINITE": lambda *_: pipe_of(Log(), detect_nonfinite=True).step(X - 1, target=X),
    "PDC-NOTPREPARED": lambda *_: pipe_of().plan,
    "PDC-CLOSED": closed,
    "PDC-LAUNCH": half_of_torchrun,
    "PDC-CONTRACT": unlike_ranks,
    "PDC-RANK": lost,
}  # fmt: skip


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [one.__dict__["code"] for one in CLASSES]
    assert len(set(codes)) == len(codes) == 20
    assert all(re.fullmatch(r"PDC-[A-Z]+", code) for code in codes)


def test_every_code_has_a_section_and_no_section_is_without_one() -> None:
    assert list(SECTIONS) == [one.code for one in CLASSES]
    assert SECTIONS.keys() - PROVOKED.keys() == {"PDC-ERROR"}
    for one in CLASSES:
        assert f"`{one.__name__}`" in SECTIONS[one.code]


@pytest.mark.parametrize("code", PROVOKED)
def test_the_page_has_the_message_as_it_is(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word by word, but for the place: lines are broken on the page."""
    with pytest.raises(PdcompileError) as caught:
        PROVOKED[code](tmp_path, monkeypatch)
    assert type(caught.value).code == code
    error = type(caught.value)(caught.value.message, remedy=caught.value.remedy)
    assert error.remedy
    (shown,) = re.findall(r"```text\n(.*?)```", SECTIONS[code], re.S)
    said = re.sub(r"^  where: .*\n", "", shown, flags=re.M).split()
    assert " ".join(said) == " ".join(str(error).split())


@pytest.mark.parametrize("kind", CLASSES)
def test_the_code_is_in_the_text_and_survives_the_way_to_another_rank(
    kind: type[PdcompileError],
) -> None:
    error = pickle.loads(pickle.dumps(kind("it broke", where="a.py:1", remedy="mend it")))
    assert type(error) is kind
    assert str(error).splitlines() == [
        "it broke",
        "  where: a.py:1",
        "  remedy: mend it",
        f"  code: {kind.code} (docs/errors.md)",
    ]


def test_a_class_from_elsewhere_has_the_code_of_its_parent() -> None:
    from pdcompile.batch.omitted_output import OmittedOutputError

    assert OmittedOutputError("x").code == "PDC-CONFIG"
