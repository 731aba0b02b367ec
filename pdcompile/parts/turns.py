"""Parts of a stage that take turns in one process, from one conversion to the next.

Written pipelines carry this file along, beside that of the conversions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from pdcompile.parts.conversions import Alone, At, result_of, thread

T = TypeVar("T")


class UnequalParts(RuntimeError):
    """Raised where parts of one process do not come to the same conversion."""


class _Ended(BaseException):
    """Raised in a part at its next conversion, once another has failed."""


class _Turn(Alone):
    """A part that runs in a thread, from one meeting to the next each time that it is resumed."""

    def __init__(self, part: int, count: int, function: Callable[[], Any]) -> None:
        super().__init__(count, part)
        self.at: At | None = None  # the conversion that it waits at
        self.given = torch.empty(0)
        self.returned: Any = None
        self._function, self._grad = function, torch.is_grad_enabled()
        self.draws = _draws()
        self._answers: SimpleQueue[Tensor | None] = SimpleQueue()  # None: it is to end
        self._stops: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"pdcompile part {part}", daemon=True
        )
        self._thread.start()

    def meet(self, x: Tensor, at: At) -> Tensor:
        self.at, self.given = at, x
        self._stops.put(None)
        return self._answer()

    def _answer(self) -> Tensor:
        answer = self._answers.get()
        if answer is None:
            self._answers.put(None)  # for whom a handler of the user's calls
            raise _Ended
        return answer

    def resume(self, answer: Tensor) -> None:
        """Runs the part up to its next meeting or its end; raises what it raised."""
        _set_draws(self.draws)
        self.at = None
        self._answers.put(answer)
        error = self._stops.get()
        self.draws = _draws()
        if error is not None:
            raise error

    def end(self) -> None:
        """Ends the part where it stands."""
        self._answers.put(None)
        self._thread.join()

    def _run(self) -> None:
        thread.parts = self
        try:
            self._answer()
            # Backward stays in this thread: the one that a device has would wait for itself.
            alone = torch.autograd.set_multithreading_enabled(False)
            with alone, torch.set_grad_enabled(self._grad):
                self.returned = self._function()
        except BaseException as error:
            self._stops.put(error)
        self._stops.put(None)


def in_turns(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Runs a function for each part in this process, and gives what they return.

    One runs at a time, up to its next conversion; then the next one does.  Each draws random
    numbers as if it were alone, from where the caller's generators stand.  Autocast and other
    modes of a thread are for the functions to open.

    Raises:
        UnequalParts: they come to different conversions, or one ends while another waits.
    """
    turns = [_Turn(part, len(functions), one) for part, one in enumerate(functions)]
    answers = [turn.given for turn in turns]
    try:
        while True:
            for turn, answer in zip(turns, answers, strict=True):
                turn.resume(answer)
            if not any(turn.at for turn in turns):
                return [turn.returned for turn in turns]
            answers = _answers(turns)
    finally:
        for turn in turns:
            turn.end()
        _set_draws(turns[0].draws)


def _answers(turns: Sequence[_Turn]) -> list[Tensor]:
    """The results of the conversion that all parts have come to."""
    first, given = turns[0], [turn.given for turn in turns]
    for turn in turns[1:]:
        if _meeting(turn) != _meeting(first):
            said = [f"part {one.part} {_state(one)}" for one in (first, turn)]
            raise UnequalParts(
                f"{' and '.join(said)}: all parts have to come to the same conversions, in the "
                "same order; undo the last edit of the stage, or write it again"
            )
    assert first.at is not None
    with torch.no_grad():  # before any goes on, and may write into what it gave
        return [result_of(first.at.kind, given, turn.part) for turn in turns]


def _meeting(turn: _Turn) -> tuple[Any, ...]:
    return (turn.at, turn.given.shape, turn.given.dtype) if turn.at else (None,)


def _state(turn: _Turn) -> str:
    x = turn.given
    return f"is at {turn.at} with {x.dtype}{list(x.shape)}" if turn.at else "has ended"


def _draws() -> list[tuple[torch.Generator, Tensor]]:
    """The states of the default generators."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found += torch.cuda.default_generators
    return [(one, one.get_state()) for one in found]


def _set_draws(states: Sequence[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)
