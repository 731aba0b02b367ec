"""The timeline of a few whole minibatches, from the first forward to the last drain."""

from __future__ import annotations

from pdcompile.passes.schedules import make_stream
from pdcompile.passes.simulate import TimelineEvent, simulate_programs
from pdcompile.plan import Plan


def drained(plan: Plan, steps: int, *, step_seconds: float = 0.0) -> tuple[TimelineEvent, ...]:
    """Simulate `steps` minibatches and the flush, so that schedules compare work for work.

    A stream such as 2bw would otherwise end with forwards whose backwards are not drawn.
    """
    stream = make_stream(plan)
    programs = []
    for _ in range(steps):
        program, stream = stream.step(plan.training.num_microbatches)
        programs.append(program)
    program, _ = stream.flush()
    return simulate_programs(plan, [*programs, program], step_seconds=step_seconds).timeline
