"""A hand-made plan and a hand-made timeline, for what draws and prints them."""

from __future__ import annotations

from pdcompile.cluster import Cluster
from pdcompile.plan import (
    Certificate,
    Edge,
    Forecast,
    MemoryLedger,
    Plan,
    StagePlan,
    TiedParameter,
    Training,
)
from pdcompile.problem import ANY_CUT
from pdcompile.schedule.program import RecordedEvent


def one_f_one_b(
    stages: int = 3, microbatches: int = 4, forward: float = 1e-3, backward: float = 2e-3
) -> tuple[RecordedEvent, ...]:
    """1F1B with equal stages and free links: the textbook picture, step by step."""
    programs: list[list[tuple[str, int]]] = []
    for s in range(stages):
        warm = min(stages - 1 - s, microbatches)
        program = [("F", i) for i in range(warm)]
        for i in range(microbatches - warm):
            program += [("F", warm + i), ("B", i)]
        program += [("B", i) for i in range(microbatches - warm, microbatches)]
        programs.append([*program, ("STEP", -1)])
    done: dict[tuple[str, int, int], float] = {}
    clock, at, events = [0.0] * stages, [0] * stages, []
    while any(at[s] < len(programs[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(programs[s]):
                action, i = programs[s][at[s]]
                before = {"F": ("F", s - 1, i), "B": ("B", s + 1, i)}.get(action)
                if before and 0 <= before[1] < stages and before not in done:
                    break
                ready = done.get(before, 0.0) if before else 0.0
                start = max(clock[s], ready)
                end = start + {"F": forward, "B": backward, "STEP": forward / 2}[action]
                events.append(RecordedEvent(s, s, action, 0, i, start, end))
                done[action, s, i] = clock[s] = end
                at[s] += 1
    return tuple(events)


def plan(*, forecast: bool = True, schedule: str = "1f1b", status: str = "optimal") -> Plan:
    """Two stages of a GPT with tied embedding, on two devices of 4 MB."""
    ledger = MemoryLedger(1_000_000, 500_000, 1_000_000, 700_000, 60_000, 60_000, 200_000)
    return Plan(
        fingerprint="0" * 64,
        stages=(
            StagePlan(
                0, ("tokens", "block_0", "block_1"),
                ("blocks.0.up.weight", "blocks.1.up.weight", "tokens.weight"),
                1, (0,), 1.5e-3, 3e-3, 1_000_000, 1_000_000, 350_000, 200_000,
            ),
            StagePlan(
                1, ("block_2", "ln", "head"), ("blocks.2.up.weight", "ln.weight", "tokens.weight"),
                1, (1,), 1.4e-3, 2.9e-3, 800_000, 800_000, 300_000, 200_000,
            ),
        ),
        edges=(Edge("block_1", 0, (1,), 65_536, True, ("b", "128"), "float32"),),
        tied=(TiedParameter("tokens.weight", (0, 1), 131_072),),
        training=Training(schedule, 4, 16, (1, 0), max_grad_norm=1.0),
        cluster=Cluster.local(2, memory="4 MB").to_toml(),
        certificate=Certificate(
            22.5e-3, 22.5e-3 if status == "optimal" else 20e-3, status, "CP-SAT", 0.31,
            ANY_CUT,
        ),
        forecast=Forecast(22.5e-3, 711.0, 0.2, (262_144, 262_144), (ledger, ledger))
        if forecast
        else None,
        notes=("batch norm sees one microbatch at a time",),
    )  # fmt: skip
