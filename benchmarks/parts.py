"""Measures the share of each model of the zoo that two devices inside a stage divide.

    python benchmarks/parts.py                        # the whole zoo, captured anew
    python benchmarks/parts.py --only gpt2 t5 --parts 4
    python benchmarks/parts.py --graphs graphs --write    # benchmarks/results/parts_coverage.md

Every model is captured in a process of its own; `--graphs` keeps what was captured in a folder,
and reads it from there.  Nothing is trained.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pdcompile.errors import ConfigError  # noqa: E402
from pdcompile.ir.graph import OpGraph  # noqa: E402
from tests.zoo.case import Entry, build  # noqa: E402
from tests.zoo.isolate import CPU_SECONDS, MEMORY_BYTES, apart, preload  # noqa: E402
from tests.zoo.models import FAMILIES, chosen  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "parts_coverage.md"
SPLITS = ("width", "sequence")
TRANSFORMERS = ("text encoder", "text decoder")
ASKED = 0.95


@dataclass(frozen=True)
class Share:
    """Shares of FLOPs and of parameter bytes that parts divide of one model by one split."""

    flops: float
    bytes: float
    stays: tuple[str, ...]  # ops that stand in the way, the costliest first


@dataclass(frozen=True)
class Row:
    name: str
    family: str
    opaque: int
    shares: dict[str, Share]

    def line(self) -> str:
        shares = "  ".join(
            f"{split} {one.flops:6.1%} {one.bytes:6.1%}" for split, one in self.shares.items()
        )
        why = next((reason for one in self.shares.values() for reason in one.stays), "")
        return f"{self.name:30} {shares}  {why}"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    warnings.simplefilter("ignore")
    folder = Path(given.graphs)
    folder.mkdir(parents=True, exist_ok=True)
    entries = [e for e in chosen(tuple(given.only), tuple(given.family)) if not e.missing]
    preload(entries)
    rows = []
    for entry in entries:
        graph = _graph(entry, folder)
        if graph is not None:
            rows.append(_row(entry, graph, given.parts))
            print(rows[-1].line(), flush=True)
    short = _short(rows)
    print(f"{len(rows)} models; transformers of text below {ASKED:.0%} by width: {short or 'none'}")
    if given.write:
        PAGE.write_text(page(rows, given.parts), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")
    return int(bool(short))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--family", nargs="+", default=[], choices=FAMILIES)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--graphs", default="out/graphs", help="folder of captured graphs")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    return parser


def _graph(entry: Entry, folder: Path) -> OpGraph | None:
    """The training graph of a model, captured in another process where it is not there yet."""
    path = folder / f"{entry.name}.train.json"
    if not path.exists():
        _, problem = apart(partial(_capture, entry, path), CPU_SECONDS, MEMORY_BYTES)
        if problem:
            print(f"left out  {entry.name}: {problem}")
            return None
    return OpGraph.from_json(path.read_text(encoding="utf-8"))


def _capture(entry: Entry, path: Path, send: Any) -> None:
    from pdcompile.batch import example_call, resolve_batch
    from pdcompile.passes.trace import capture

    case = build(entry, dropout=0.1)
    flat = example_call(case.model, case.inputs(0), case.target(0))
    layout = resolve_batch(flat, case.batch_dims)
    found = capture(case.model, flat, layout, case.loss_fn, microbatch_size=2)
    path.write_text(found.train.to_json(), encoding="utf-8")
    send(len(found.train.ops))


def _row(entry: Entry, graph: OpGraph, parts: int) -> Row:
    shares = {split: _share(graph, split, parts) for split in SPLITS}
    return Row(entry.name, entry.family, sum(op.opaque for op in graph.ops), shares)


def _share(graph: OpGraph, split: Any, parts: int) -> Share:
    from pdcompile.passes.parts.axes import Axes
    from pdcompile.passes.parts.layouts import lay_out

    try:
        found = lay_out(graph, split, parts, outputs=False)
    except ConfigError as error:
        return Share(0.0, 0.0, (error.message,))
    flops = sum(Axes.of(graph).products.values())
    parameters = {f: one for f, one in graph.tensors.items() if one.kind == "parameter"}
    split_bytes = sum(one.bytes for fqn, one in parameters.items() if fqn in found.shards)
    stays = sorted((one for one in found.stays if one.flops), key=lambda one: -one.flops)
    return Share(
        1 - sum(one.flops for one in stays) / max(flops, 1),
        split_bytes / max(sum(one.bytes for one in parameters.values()), 1),
        tuple(dict.fromkeys(f"{one.op}: {one.reason}" for one in stays)),
    )


def _short(rows: Iterable[Row]) -> list[str]:
    """Encoders and decoders of text, without opaque modules, below what is asked."""
    return [
        row.name
        for row in rows
        if row.family in TRANSFORMERS and not row.opaque and row.shares["width"].flops < ASKED
    ]


def page(rows: Sequence[Row], parts: int) -> str:
    """benchmarks/results/parts_coverage.md."""
    text = [row for row in rows if row.family in TRANSFORMERS]
    fine = sum(row.shares["width"].flops >= ASKED for row in text)
    every = sum(row.shares["width"].flops >= ASKED for row in rows)
    lines = [
        "# What parts of a stage can divide",
        "",
        f"Each model of the zoo in training, with dropout, divided between {parts} devices of one",
        "stage: by *width* (heads, inner widths, channels: weights are split, as in Megatron-LM)",
        "and by *sequence* (tokens are split, attention by heads, as in DeepSpeed-Ulysses).",
        "",
        "*FLOPs* is the share of the operations of matrix products, convolutions and attention",
        "that each device does only its part of. *Bytes* is the share of the parameters' bytes of",
        "which it holds a slice. An op that stands in the way is computed whole on every device:",
        "the result is the same, and nothing is gained there. By width, tables of embeddings and",
        "logits are divided along the vocabulary, where it is large and the parts divide it;",
        "training steps give no outputs here.",
        "",
        "`compile(…, parts=2, split=…)` runs it: "
        "[Devices inside a stage](../../docs/more_devices.md).",
        "",
        f"By width, {fine} of {len(text)} encoders and decoders of text have at least {ASKED:.0%}"
        f" of their FLOPs divided, and {every} of all {len(rows)} models.",
        "",
        "Written by `python benchmarks/parts.py --write`.",
        "",
        "| model | family | width: FLOPs | bytes | sequence: FLOPs | bytes | whole by width |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        numbers = " | ".join(f"{s.flops:.0%} | {s.bytes:.0%}" for s in row.shares.values())
        stays = row.shares["width"].stays
        more = f" and {len(stays) - 2} more" if len(stays) > 2 else ""
        why = "; ".join(stays[:2]).replace("|", "\\|") + more
        opaque = f"{row.opaque} opaque. " if row.opaque else ""
        lines.append(f"| {row.name} | {row.family} | {numbers} | {opaque}{why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
