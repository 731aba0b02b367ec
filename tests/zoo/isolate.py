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
from collections.abc import Iterable

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

    A process that dies or takes longer than four times its CPU limit is reported as crashed, at
    the step that it had come to.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(entry, thorough, writing, cpu_seconds, memory_bytes)
    os.close(writing)
    lines, late = _read(reading, child, 4 * cpu_seconds)
    _, status = os.waitpid(child, 0)
    report = Report(entry.name, entry.family)
    if lines:
        report = Report.from_dict(json.loads(lines[-1]))
    if status != 0:
        report.result = "crashed"
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        reason = {signal.SIGXCPU: f"{cpu_seconds} CPU seconds used up"}.get(number)
        report.detail = reason or f"the process ended with status {status}"
        report.detail = f"no answer in {4 * cpu_seconds} seconds" if late else report.detail
    return report


def _child(entry: Entry, thorough: bool, writing: int, seconds: int, memory: int) -> None:
    """Check, report, and end the process without running anything of the parent."""
    status = 1
    try:
        import torch

        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

        def send(report: Report) -> None:
            os.write(writing, (json.dumps(report.to_dict()) + "\n").encode())

        send(check(entry, thorough=thorough, progress=send))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _read(descriptor: int, child: int, seconds: float) -> tuple[list[str], bool]:
    """Complete lines until the end, and whether the child had to be killed."""
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
    return text.decode().splitlines()[: text.count(b"\n")], late
