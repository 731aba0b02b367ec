"""What Python itself takes for an instruction: CPU seconds of the interpreter's thread.

Not counted are those inside of the stages' forward and loss, of autograd, of the optimizer, of
copies of weights, and of gloo, which copies messages into sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any
from unittest.mock import patch

from torch.autograd import graph

from pdcompile.runtime.interpreter import Worker
from pdcompile.runtime.pipeline import Pipeline
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.transport import links, reductions
from pdcompile.runtime.transport.links import Working


@dataclass(slots=True)
class Meter:
    """CPU seconds of this thread inside of some functions, and how often they were called."""

    seconds: float = 0.0
    calls: int = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1

        return measured


def python_seconds(pipe: Pipeline, step: Callable[[], Any]) -> float:
    """Seconds of one instruction, on average over a step."""
    return mean(each_python_seconds(pipe, step))


def each_python_seconds(pipe: Pipeline, step: Callable[[], Any]) -> list[float]:
    """Seconds of each instruction of a step, in their order."""
    found: list[float] = []
    whole, model = Meter(), Meter()
    execute = whole.around(Worker.execute)

    def noted(*args: Any) -> None:
        before = whole.seconds - model.seconds
        execute(*args)
        found.append(whole.seconds - model.seconds - before)

    with _metered(pipe, noted, model):
        step()
    return found


@contextmanager
def _metered(pipe: Pipeline, execute: Callable[..., None], model: Meter) -> Iterator[None]:
    session = pipe._session
    assert session is not None
    with ExitStack() as stack:
        stack.enter_context(patch.object(Worker, "execute", execute))
        engine = model.around(graph._engine_run_backward)
        stack.enter_context(patch.object(graph, "_engine_run_backward", engine))
        if session.optimizer is not None:
            kind = type(session.optimizer)  # of the optimizer itself changes are noticed
            stack.enter_context(patch.object(kind, "step", model.around(kind.step)))
        # What begins messages and sums is gloo's; the way there is Python's, of sends and receives.
        tensors = (
            (links, "unrecorded"), (reductions, "unrecorded"), (Working, "wait"),
            (StageWeights, "advance"),
        )  # fmt: skip
        for owner, name in tensors:
            stack.enter_context(patch.object(owner, name, model.around(getattr(owner, name))))
        for worker in session.workers:
            for module in worker.weights.modules:
                for name in ("forward", "loss"):
                    if hasattr(module, name):
                        found = model.around(getattr(module, name))
                        stack.enter_context(patch.object(module, name, found))
        yield
