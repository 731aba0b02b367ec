"""Exit hooks: tell other ranks how the program of this one ends while they still count on it.

An error that the program raises between two calls passes no code of ours on its way up: it is seen
by `sys.excepthook`, which is ours while a pipeline is open and hands on to the one before.  What no
Python code can tell any more (os._exit, a signal) peers ask the system (`exit_status`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from pdcompile.runtime.failure.first_cause import Failures, describe
from pdcompile.runtime.failure.host_peers import identity
from pdcompile.runtime.failure.instruction_log import number_in_words
from pdcompile.runtime.failure.watchdog import Watchdog

_open: list[PipelineExit] = []


class PipelineExit:
    """One open pipeline of this process, as far as its end is concerned.

    It keeps neither the pipeline nor its connections alive.  `leave` ends it with a cause.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.rank = rank
        self.leave: weakref.WeakMethod[Any] | None = None
        self.watchdog: Watchdog | None = None
        self._tell = Failures(store, rank, 0).say
        self._owner: weakref.ref[Any] | None = None
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._last = "before the first call"
        self.raised = ""
        self._tell("process", identity())
        _open.append(self)
        _Hooks.install()

    def belongs_to(self, pipeline: object) -> None:
        """Notice when the program lets go of its pipeline without closing it."""
        self._owner = weakref.ref(pipeline, lambda _: self._dropped())

    def called(self, call: str, minibatch: int) -> None:
        """This thread makes a call of the pipeline's: the program goes on."""
        if self.raised:  # and yet the program goes on
            self.raised = ""
            self._tell("raised", "")
        self._thread = threading.get_ident()
        self._last = f"after {call} ({number_in_words(minibatch)})"

    def over(self) -> None:
        """The pipeline is closed, or its failure is known."""
        self._owner = None  # at the interpreter's end its callback would find nothing here
        if self in _open:
            _open.remove(self)
        if self.watchdog is not None:
            self.watchdog.stop()
        if not _open:
            _Hooks.remove()

    def failed(self, error: BaseException) -> None:
        """An error that nobody caught, in this thread; peers read it once connections break."""
        if self.here and threading.get_ident() == self._thread:
            self.raised = describe(self.rank, error, None, 0, f", {self._last}")
            self._tell("raised", self.raised)

    @property
    def here(self) -> bool:
        """True in the process of the pipeline, False in one that was forked from it."""
        return os.getpid() == self._process

    def end(self) -> None:
        """The program is at its end."""
        leave = self.leave() if self.leave is not None else None
        if self.here and self.raised and leave is not None:
            leave(self.raised)
        elif self.here:
            self._tell("left", self._ended)
        self.over()

    def _dropped(self) -> None:
        if self in _open and self.here:
            text = f"rank {self.rank} let go of the pipeline without pipe.close(), {self._last}"
            text += ": its program goes on without it, or has caught an error itself"
            self._tell("left", text if _goes_on() else self._ended)
        self.over()

    @property
    def _ended(self) -> str:
        reason = "with sys.exit or its last line"
        return f"rank {self.rank} ended {reason} and without pipe.close(), {self._last}"


class _Hooks:
    """The hooks of the interpreter, ours while a pipeline is open; they hand on to those before."""

    present: _Hooks | None = None

    def __init__(self) -> None:
        self._before = sys.excepthook, threading.excepthook
        self._mine = self._of_program, self._of_thread
        sys.excepthook, threading.excepthook = self._mine
        atexit.register(self._at_exit)

    @classmethod
    def install(cls) -> None:
        cls.present = cls.present or cls()

    @classmethod
    def remove(cls) -> None:
        """Put the hooks back, unless the program has put others on top of them."""
        hooks, cls.present = cls.present, None
        if hooks is None:
            return
        if sys.excepthook is hooks._mine[0]:
            sys.excepthook = hooks._before[0]
        if threading.excepthook is hooks._mine[1]:
            threading.excepthook = hooks._before[1]
        atexit.unregister(hooks._at_exit)

    def _of_program(self, kind: Any, error: BaseException, trace: Any) -> None:
        pipelines = list(_open)
        for one in pipelines:
            one.failed(error)
        try:
            self._before[0](kind, error, trace)
        finally:
            for one in pipelines if not _goes_on() else ():
                if one in _open:
                    one.end()

    def _of_thread(self, args: Any) -> None:
        for one in list(_open) if args.exc_value is not None else ():
            one.failed(args.exc_value)
        self._before[1](args)

    def _at_exit(self) -> None:
        for one in list(_open):
            one.end()


def _goes_on() -> bool:
    """True if the program runs on after this call of ours.

    At its end, while an error or SystemExit is being disposed of, nothing of it is on the stack;
    but it may call its excepthook itself, as a prompt does.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    elsewhere = threading.current_thread() is not threading.main_thread()
    prompt = bool(sys.flags.interactive) or hasattr(sys, "ps1")
    return elsewhere or prompt or frame is not None
