"""Checks in a process of their own each, so that none can hurt, slow down or change another."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tests.zoo.case import Entry
from tests.zoo.check import Report, check

CPU_SECONDS = 300
MEMORY_BYTES = 8 << 30


def preload(entries: Iterable[Entry]) -> None:
    """Import here what all checks need, so that no child has to (10 CPU seconds otherwise).

    Nothing is computed: a process that has used torch's threads must not be forked.
    """
    import torch._dynamo  # noqa: F401
    from ortools.sat.python import cp_model  # noqa: F401

    if any(entry.library == "transformers" and not entry.missing for entry in entries):
        import transformers.modeling_utils  # noqa: F401
        from transformers import (  # noqa: F401
            BertForMaskedLM,
            CLIPModel,
            LlamaForCausalLM,
            T5ForConditionalGeneration,
            Wav2Vec2ForCTC,
        )


def checked(
    entry: Entry,
    *,
    thorough: bool,
    cpu_seconds: int = CPU_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> Report:
    """The report of a forked process that checks this entry.

    A process that dies, or that takes four times its CPU limit, is reported as crashed at the
    step that it had come to.
    """

    def work(send: Callable[[Any], None]) -> None:
        send(check(entry, thorough=thorough, progress=lambda r: send(r.to_dict())).to_dict())

    lines, problem = apart(work, cpu_seconds, memory_bytes)
    report = Report.from_dict(lines[-1]) if lines else Report(entry.name, entry.family)
    if problem:
        report.result, report.detail, report.failed_step = "crashed", problem, report.step
    return report


def judged(entry: Entry, *, cpu_seconds: int = CPU_SECONDS) -> dict[str, tuple[str, str]]:
    """Judgements of other front ends on this entry: name to (result, reason)."""
    from tests.zoo.peers import FRONTS, judge

    found = {}
    for name, front in FRONTS.items():
        work = partial(_judge, judge, entry, front)
        lines, problem = apart(work, cpu_seconds, MEMORY_BYTES)
        result, reason = lines[-1] if lines else ("refused", problem)
        found[name] = (str(result), str(reason))
    return found


def _judge(judge: Any, entry: Entry, front: Any, send: Callable[[Any], None]) -> None:
    send(judge(entry, front))


def apart(
    work: Callable[[Callable[[Any], None]], None], cpu_seconds: int, memory_bytes: int
) -> tuple[list[Any], str]:
    """Run in a forked process with limits: (what it sent, why it did not end well or "")."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_and_exit(work, writing, cpu_seconds, memory_bytes)
    os.close(writing)
    lines, late = _read(reading, child, 4 * cpu_seconds)
    _, status = os.waitpid(child, 0)
    if late:
        return lines, f"no answer in {4 * cpu_seconds} seconds"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return lines, f"{cpu_seconds} CPU seconds used up"
    return lines, f"the process ended with status {status}" if status else ""


def _run_and_exit(
    work: Callable[[Callable[[Any], None]], None], writing: int, seconds: int, memory: int
) -> None:
    """Work, and end the process without running anything of the parent's."""
    status = 1
    try:
        import torch

        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        with os.fdopen(writing, "w", buffering=1) as pipe:
            work(lambda data: print(json.dumps(data), file=pipe, flush=True))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _read(descriptor: int, child: int, seconds: float) -> tuple[list[Any], bool]:
    """Text that was sent until the end, and whether the child had to be killed."""
    text, late, deadline = b"", False, time.monotonic() + seconds
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        while True:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = True
                os.kill(child, signal.SIGKILL)
                break
            part = stream.read(1 << 16)
            if not part:
                break
            text += part
    whole = text.decode().splitlines()[: text.count(b"\n")]
    return [json.loads(line) for line in whole], late
