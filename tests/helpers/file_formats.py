"""Every format that pdcompile reads from a disk: small whole files, and what reads them."""

from __future__ import annotations

import json
import shutil
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from pdcompile import jsonio
from pdcompile.checkpoint.contents import open_checkpoint
from pdcompile.checkpoint.extra_states import fitting_state, states_of
from pdcompile.checkpoint.manifest import (
    MANIFEST,
    PLAN,
    Holding,
    HoldingKind,
    Manifest,
    StoredScheduler,
    read_manifest,
)
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.cluster import Cluster
from pdcompile.compiled import Compiled
from pdcompile.errors import PdcompileError, SourceError
from pdcompile.ir.graph import OpGraph, fingerprint
from pdcompile.ir.graph_json import encode
from pdcompile.ir.records import Affine, Attr, DictOf, LeftOut, ListOf, Ref, Slice, TorchLiteral
from pdcompile.ir.targets import resolve
from pdcompile.options import Options
from pdcompile.passes.profile import cache
from pdcompile.passes.profile.entries import Entry
from pdcompile.plan import Plan
from pdcompile.plan.embedded import problem_of
from pdcompile.schedule.registry import kind_of
from pdcompile.schedule.written import from_csv, parse
from pdcompile.schedule.written import read as read_schedule
from pdcompile.user_plans import user_sources
from pdcompile.weights.tensor_files import INDEX, TensorFiles
from tests.helpers import mutants
from tests.helpers.fuzzing import Format, unaudited
from tests.helpers.graphs import residual
from tests.helpers.planned import planned
from tests.helpers.report_data import plan as drawn_plan
from tests.helpers.resuming import pipeline, train

JSON = mutants.chain(mutants.of_json, mutants.of_json, mutants.of_json, mutants.of_bytes)
TEXT = mutants.chain(mutants.of_text, mutants.of_text, mutants.of_bytes)
WRITTEN = "mine: 0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"
ENVIRONMENT = cache.Environment("2.13", "cpu", "a processor", 1, 4)


VALUES = {
    "last_epoch": 3, "base_lrs": [0.1, 1e-3], "betas": (0.9, 0.999), "none": None, "on": True,
    "huge": 2**70, "inf": float("inf"), "z": 1 + 2j, "dtype": torch.float64, "set": {1, "a"},
    "values": torch.ones(2, 2), "empty": torch.ones(0), "counter": Counter({5: 1}),
    "ordered": OrderedDict(a=1), "default": defaultdict(dict, {(1, "a"): {}}), "queue": deque([1]),
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """A training that was saved: what was compiled for it, and its folder of checkpoints."""

    compiled: Compiled
    saved: Path

    @staticmethod
    def make(folder: Path) -> Training:
        pipe = pipeline("2bw", 2, tied=True)
        train(pipe, 0, 1)
        pipe.save(folder / "saved")
        compiled = pipe._session.compiled
        pipe.close()
        (made,) = (folder / "saved").glob("save-*")
        # The states of random generators are long; of other values there is one of every kind.
        whole = read_manifest(made)
        lr = StoredScheduler("lr", "LambdaLR", (), Encoder(inline=True).encode(VALUES, "lr"))
        stages = (replace(whole.stages[0], schedulers=(lr,)), *whole.stages[1:])
        whole = replace(whole, random_states=(), stages=stages)
        text = whole.to_text().encode()
        (made / MANIFEST).write_bytes(text)
        return Training(compiled, folder / "saved")


def formats(folder: Path, makers: Mapping[str, Callable[..., Format]]) -> Iterator[Format]:
    """The format of each maker, which gets a folder of its own in `folder`."""
    training = Training.make(folder)
    for name, make in makers.items():
        own = folder / name
        own.mkdir()
        yield make(own, training)


def put(place: Path, data: bytes) -> Path:
    with unaudited():
        place.write_bytes(data)
    return place


def _plan(folder: Path, training: Training) -> Format:
    def read(data: bytes) -> Plan:
        plan = Plan.load(put(folder / PLAN, data))
        plan.hash()
        Cluster.from_toml(plan.cluster)
        if plan.problem is not None:
            problem_of(plan, PLAN)
        return plan

    searched = planned(residual(3), Cluster.local(3))
    written = training.compiled.plan
    written = replace(
        written, training=replace(written.training, schedule=WRITTEN, num_microbatches=2)
    )
    seeds = (searched, drawn_plan(), training.compiled.plan, written)
    return Format(
        "plan", tuple(plan.to_json().encode() for plan in seeds), JSON, read, folder,
        lambda plan: (Plan.from_json(plan.to_json()), plan),
    )  # fmt: skip


def _graph(folder: Path, training: Training) -> Format:
    def read(data: bytes) -> OpGraph:
        graph = OpGraph.from_json(data)
        str(graph)
        fingerprint(graph)
        for op in graph.ops:
            _known(op.target)
        return graph

    graph = training.compiled.capture.train
    some = (
        Affine(2, 1), Attr("first.weight"), LeftOut("x"), ListOf((1, 2.5)),
        TorchLiteral("dtype", "float32"), Slice(0, Ref(graph.inputs[0].name), None),
        DictOf((("a", 1j), ("b", ...))), 2**70,
        float("inf"), -(2**70), (True, None, "text"),
    )  # fmt: skip
    assert all(encode(one) is not None for one in some)
    first = replace(graph.ops[-1], kwargs=(*graph.ops[-1].kwargs, ("some", some)))
    rich = replace(graph, ops=(*graph.ops[:-1], first))
    seeds = (residual(2).to_json(), graph.to_json(), rich.to_json())
    return Format(
        "graph", tuple(text.encode() for text in seeds), JSON, read, folder,
        lambda found: (OpGraph.from_json(found.to_json()).to_json(), found.to_json()),
    )  # fmt: skip


def _known(target: str) -> bool:
    """Whether an operator is called so: what planning and generating ask of every op."""
    try:
        resolve(target)
    except SourceError:
        return False
    return True


def _schedule(folder: Path, _: Training) -> Format:
    place = folder / "mine.csv"

    def read(data: bytes) -> Any:
        put(place, data)
        found = read_schedule(place)
        kind_of(str(found))
        return found

    def again(found: Any) -> tuple[Any, Any]:
        return from_csv(found.to_csv(), "again", found.name), found

    split = "split: 0F0 0F1 0I0 0W0 0I1 0W1 | 1F0 1I0 1W0 1F1 1I1 1W1"
    seeds = [parse(text, "") for text in (WRITTEN, "one: 0F0 0B0", split)]
    texts = [one.to_csv() for one in seeds] + ["0F0,(0F1;0B0)OVERLAP_F_B,0B1,0UNSHARD\n"]
    return Format("schedule csv", tuple(text.encode() for text in texts), TEXT, read, folder, again)


def _cluster(folder: Path, _: Training) -> Format:
    full = """
notes = ["a note"]
[[devices]]
count = 3
kind = "cuda"
memory = "80 GB"
speed = 1.5
[[devices]]
speed = 1
[[levels]]
name = "nvlink"
size = 2
bandwidth = "100 GB/s"
latency = "5 us"
duplex = "half"
[[levels]]
size = 2
bandwidth = 1e9
latency = 0.5
"""
    seeds = (full, Cluster.local(2, memory="1 GB").to_toml(), Cluster.parse("2x4").to_toml())
    mutate = mutants.chain(mutants.of_toml, mutants.of_toml, mutants.of_text, mutants.of_bytes)
    return Format(
        "cluster", tuple(text.encode() for text in seeds), mutate,
        lambda data: Cluster.load(str(put(folder / "cluster.toml", data))), folder,
        lambda found: (Cluster.from_toml(found.to_toml()), found),
    )  # fmt: skip


ENTRIES = (Entry("one", "torch.relu", 1e-3), Entry("two", "torch.tanh", 2e-3, 1e-3))


def _cached(folder: Path, _: Training) -> Format:
    def read(data: bytes) -> Any:
        put(place, data)
        with patch.object(cache, "cache_folder", lambda: folder):
            return cache.load(ENVIRONMENT, ("one", "two"))

    with patch.object(cache, "cache_folder", lambda: folder):
        cache.save(ENVIRONMENT, ("one", "two"), ENTRIES)
    (place,) = folder.iterdir()
    return Format("cached profile", (place.read_bytes(),), JSON, read, folder)


def _copied(folder: Path, training: Training) -> Path:
    """The one checkpoint in a copy of the folder of checkpoints."""
    (made,) = Path(shutil.copytree(training.saved, folder / "saved")).glob("save-*")
    return made


def _manifest(folder: Path, training: Training) -> Format:
    place = _copied(folder, training)

    def mutate(data: bytes, draw: Any) -> bytes:
        """Mostly with the checksum that belongs to it."""
        changed = JSON(data, draw)
        if draw.random() < 0.1:
            return changed
        try:
            found = jsonio.decode(Manifest, json.loads(changed), where="")
            return found.to_text().encode()
        except (PdcompileError, ValueError, RecursionError):
            return changed

    def read(data: bytes) -> Manifest:
        put(place / MANIFEST, data)
        contents = open_checkpoint(place)
        _everything(contents)
        return contents.manifest

    return Format(
        "manifest", ((place / MANIFEST).read_bytes(),), mutate, read, folder,
        lambda found: (found, jsonio.decode(Manifest, json.loads(found.to_text()), where="")),
    )  # fmt: skip


def _everything(contents: Any) -> None:
    """Do what loading reads, and what `pdcompile checkpoint show --verify` does."""
    contents.verify()
    contents.groups()
    for parts in contents.schedulers().values():
        fitting_state([*parts.values()], ())
        [decode(part.state, "schedulers") for part in parts.values()]
    for _, states in contents.manifest.random_states:
        states_of(states, "random_states")
    for name in contents._weights:
        contents.tensor(Holding(HoldingKind.WEIGHT, name))
        contents.optimizer_state(name)
        contents.accumulated(name)
        for version in contents.versions(name)[:-1]:
            contents.tensor(Holding(HoldingKind.OLDER, name, version))


def _saved_plan(folder: Path, training: Training) -> Format:
    """Plan as saved, with a manifest that has its checksum."""
    place = _copied(folder, training)
    manifest = replace(read_manifest(place), stages=(), aliases=())

    def read(data: bytes) -> Plan:
        put(place / PLAN, data)
        its = replace(manifest, plan_crc32=zlib.crc32(data))
        put(place / MANIFEST, its.to_text().encode())
        return Plan.from_json(open_checkpoint(place).plan_text(), where=PLAN)

    return Format("saved plan", ((place / PLAN).read_bytes(),), JSON, read, folder)


def _tensors(folder: Path, training: Training) -> Format:
    """Tensors as weights=, and in the place of a file of a checkpoint."""
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int64)}
    save_file(state, folder / "whole.safetensors", {"format": "pt"})
    whole = (folder / "whole.safetensors").read_bytes()
    place = _copied(folder, training)
    manifest = read_manifest(place)
    weights = manifest.stages[0].weights
    stage = replace(
        manifest.stages[0], files=(weights,), trained=(), updates=0,
        older=(), waiting=0, groups=(), state={}, schedulers=(),
    )  # fmt: skip
    manifest = replace(manifest, stages=(stage,), aliases=())
    (place / MANIFEST).write_bytes(manifest.to_text().encode())
    shard = place / weights.name

    def read(data: bytes) -> Any:
        put(shard, data)
        open_checkpoint(place).verify()
        files = TensorFiles([put(folder / "model.safetensors", data)])
        like = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in state.items()}
        return [files.tensor(name, like.get(name, like["a"])) for name in files.files]

    mutate = mutants.chain(mutants.of_safetensors, mutants.of_safetensors, mutants.of_bytes)
    return Format("safetensors", (whole,), mutate, read, folder)


def _index(folder: Path, _: Training) -> Format:
    for name in ("x", "y"):
        save_file({name: torch.ones(2)}, folder / f"{name}.safetensors")
    data = {
        "metadata": {"total_size": 16},
        "weight_map": {"x": "x.safetensors", "y": "y.safetensors"},
    }

    def read(data: bytes) -> Any:
        files = TensorFiles([put(folder / INDEX, data).parent])
        return [files.tensor(name, torch.empty(2)) for name in files.files]

    return Format("weights index", (json.dumps(data).encode(),), JSON, read, folder)


def _sources(folder: Path, training: Training) -> Format:
    """A stage's file that was edited is not executed: it is refused, unless that is allowed."""
    generated = training.compiled.sources
    for name, text in generated.files.items():
        (folder / name).write_text(text)
    options = Options.given({"sources": str(folder)})

    def read(data: bytes) -> Any:
        put(folder / "stage_0.py", data)
        return user_sources(options, generated).files

    seeds = (generated.files["stage_0.py"].encode(),)
    return Format("sources", seeds, TEXT, read, folder)


MAKERS: dict[str, Callable[[Path, Training], Format]] = {
    "plan": _plan,
    "graph": _graph,
    "schedule-csv": _schedule,
    "cluster": _cluster,
    "cached-profile": _cached,
    "manifest": _manifest,
    "saved-plan": _saved_plan,
    "safetensors": _tensors,
    "weights-index": _index,
    "sources": _sources,
}
