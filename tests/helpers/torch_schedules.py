"""The schedules of torch.distributed.pipelining, written by torch itself as files.

What makes and writes them is private to torch: where it has changed, `dump` says so.
"""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import schedules


class Source(NamedTuple):
    """A class of torch's, its stages on a rank (`folded`: the last one is on rank 0)."""

    per_rank: int
    folded: bool = False
    lowered: bool = True  # torch lowers it to sends and receives
    made_by: str = ""  # where not by the class of that name


#: Schedule1F1B draws its last stage from microbatch 1 on; of one stage a rank, interleaved is it
CLASSES = {
    "ScheduleGPipe": Source(1, lowered=False),
    "Schedule1F1B": Source(1, made_by="ScheduleInterleaved1F1B"),
    "ScheduleLoopedBFS": Source(2),
    "ScheduleInterleaved1F1B": Source(2),
    "ScheduleInterleavedZeroBubble": Source(2),
    "ScheduleZBVZeroBubble": Source(2, folded=True),
    "ScheduleDualPipeV": Source(2, folded=True),
}


def dump(
    name: str, ranks: int, microbatches: int, path: Path, *, lowered: bool = False
) -> Path | None:
    """Write a schedule for so many ranks; None where torch refuses these counts.

    `lowered`: with the sends, receives and reductions that torch adds to it.
    """
    source = CLASSES[name]
    try:
        kind = getattr(schedules, source.made_by or name)
        try:
            made = kind(_stages(ranks, source), microbatches)
        except ValueError:
            return None
        if source.lowered:
            made._dump_csv(path, format="compute_comms" if lowered else "compute_only")
        else:
            with path.open("w", newline="") as file:
                csv.writer(file).writerows(made._get_pipeline_order().values())
    except (AttributeError, TypeError) as error:
        raise AssertionError(
            f"torch {torch.__version__} makes or writes its schedules in another way than this "
            f"test does ({error}): adapt tests/helpers/torch_schedules.py"
        ) from error
    return path


def _stages(ranks: int, source: Source) -> Any:
    """Stages as its constructors read them, of rank 0."""
    count = ranks * source.per_rank
    stages = [
        SimpleNamespace(
            stage_index=index, stage_index_to_group_rank={}, num_stages=count, group_size=ranks,
            group_rank=0, group=None, is_first=index == 0, is_last=index == count - 1,
            has_backward=True, device=torch.device("cpu"), submod=torch.nn.Identity(),
        )
        for index in ((0, count - 1) if source.folded else range(0, count, ranks))
    ]  # fmt: skip
    return stages if source.lowered else stages[0]
