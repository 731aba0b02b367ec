"""``pdcompile probe``: the machines that are here, measured, as a cluster.toml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pdcompile.cli.options import verb, written_to
from pdcompile.cli.output import Result, is_first_rank, write_text

if TYPE_CHECKING:
    from pdcompile.passes.probe.probed import Probed


@verb()
def probe(
    output: Annotated[Path, written_to("Where the description goes.")] = Path("cluster.toml"),
) -> Result | None:
    """Measure devices and links of a torchrun job, and describe them as a cluster.

    Speed and memory of every device; latency and bandwidth between every pair of ranks, while all
    others wait, and again while all send at once; --json has them. Levels (inside a host, between
    hosts) are found by where the times of messages jump. Bandwidth is that of all at once where
    it is more than a fifth below that of a pair alone (half duplex: of a pair whose ends both
    send); notes in the file have all three.

    Start one process a device, on all hosts, ranks of a host next to each other, as torchrun does.
    It takes some 0.3 s a pair: 10 s for 8 ranks, 3 min for 32.

    Examples:

      torchrun --nproc-per-node=4 -m pdcompile probe -o cluster.toml

      pdcompile plan gpt.py:build --cluster cluster.toml
    """
    from pdcompile.passes.probe.links import job
    from pdcompile.passes.probe.probed import probe as probed
    from pdcompile.report.progress import working

    with working("probe", "measuring") as live, job() as (rank, ranks, device):
        found = probed(rank, ranks, device, live.found)
    if not is_first_rank():
        return None
    write_text(output, found.cluster.to_toml())
    document = {
        "status": "done",
        "written": str(output),
        "devices": found.devices,
        "levels": found.cluster.levels,
        "links": found.times,
        "notes": found.cluster.notes,
    }
    return Result(document, [*lines(found), f"written: {output}"])


def lines(found: Probed) -> list[str]:
    """Lines of a report on the measurements."""
    from pdcompile.units import format_bytes, format_flops, format_rate, format_seconds

    shown = []
    for rank, one in enumerate(found.devices):
        shown.append(
            f"rank {rank}: {one.name} on {one.host}, {format_bytes(one.memory_bytes)}, "
            f"{format_flops(one.machine.flops_per_second)}/s float32, memory "
            f"{format_rate(one.machine.bytes_per_second)}, "
            f"{format_seconds(one.machine.call_seconds)} an op; "
            f"speed {found.cluster.devices[rank].speed:g}"
        )
    for level in found.cluster.levels if found.times is not None else ():
        duplex = "full" if level.full_duplex else "half"
        shown.append(
            f"{level.name}: {level.size} blocks, {format_rate(level.bytes_per_second)} a device, "
            f"{format_seconds(level.latency_seconds)} a message, {duplex} duplex"
        )
    return [*shown, *(f"note: {note}" for note in found.cluster.notes)]
