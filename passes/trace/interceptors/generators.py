"""Random numbers from elsewhere than torch: functions that draw them are one op each.

An array that is drawn with numpy or Python may become a tensor (`torch.tensor(mask)`) or an index.
Whatever else Python does with it, and with a drawn number, needs the values, and makes the module
opaque that does it.  Tensors that forward makes of other arrays are constants.

Numbers that nobody sees being drawn, because `rand` was imported by itself, would become constants
of the graph: the states of the generators are compared, and restored in the end.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pdcompile.eager.own_draws import other_threads
from pdcompile.eager.randomness import preserved_rng
from pdcompile.eager.snapshot import is_array
from pdcompile.errors import TraceError
from pdcompile.hardware import devices
from pdcompile.ir import python_draws
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace import real_shapes, refusals
from pdcompile.passes.trace.assumptions import Refuted
from pdcompile.passes.trace.tape.arguments import with_parts
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed, patched
from pdcompile.passes.trace.tape.observer import locate
from pdcompile.releases.torch_internals import FakeTensor, NoTorchFunction, no_dispatch_modes

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape


def _outside(generator: str, where: str | None) -> TraceError:
    """The refusal; where other threads live, one of them may have drawn."""
    told = refusals.error(refusals.OUTSIDE_RANDOM, generator, where, refusals.NeverOpaque)
    if others := other_threads():
        told.message += f", or another thread does: {', '.join(others)} may draw meanwhile"
        told.remedy = f"call pipe.prepare before they draw, or, if none draws, {told.remedy}"
    return told


class Sentinel:
    """The states of all generators that forward might use."""

    def __init__(self) -> None:
        self._now = python_draws.states()
        self._marks = python_draws.marks()
        self._torch_seed = torch.default_generator.initial_seed()
        self._torch = torch.default_generator.get_state()

    def check(self, where: str | None, *, whole: bool = False) -> None:
        """Raises TraceError when Python's or numpy's generator was used, or torch's seeded.

        `whole`: though the marks of both are as before.
        """
        if whole or python_draws.marks() != self._marks:
            python, numpy = python_draws.states()
            if python != self._now[0]:
                raise _outside("Python's random module", where)
            if numpy != self._now[1]:
                raise _outside("numpy.random", where)
        if torch.default_generator.initial_seed() != self._torch_seed:
            raise _outside("torch's default generator", where)

    def check_torch(self, where: str | None) -> None:
        """Raises TraceError for draws from torch's generator; outside of all modes only."""
        if not torch.equal(torch.default_generator.get_state(), self._torch):
            raise _outside("torch's default generator", where)

    def follow(self, _: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function of Python's or numpy's generator, which may draw."""
        self.check(None)
        result = function(*args, **kwargs)
        self._now, self._marks = python_draws.states(), python_draws.marks()
        return result


class Generators(Interceptor):
    """Refuses draws and seeds outside of recorded ops."""

    _sentinel: Sentinel | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Guards the generators, and restores them at the end.

        Inside, torch.initial_seed is refused: the seed would become a constant of the graph.
        """
        sentinel = self._sentinel = Sentinel()
        ops = self.tape.ops
        unseeded = Unseeded(lambda: sum(op.draw is not None for op in ops), self.tape.where)
        with preserved_rng():
            with patched(
                (torch, "initial_seed", _refuse_seed),
                (torch.random, "initial_seed", _refuse_seed),
                (torch.random, "default_generator", unseeded),
            ):
                yield
            sentinel.check("forward, after its last operator", whole=True)
            sentinel.check_torch("forward")

    def recorded(self, source: str) -> None:
        if self._sentinel is not None:
            self._sentinel.check(source)


def _refuse_seed() -> NoReturn:
    raise refusals.error(refusals.SEED, "", locate()[0], refusals.NeverOpaque)


@dataclass(eq=False)
class Unseeded:
    """Torch's generator as the functions of torch.random see it, which may not seed it, or restore
    a state that was drawn from since.

    Both would make eager draw the same numbers again, while each draw of a graph has its own.

    Args:
        draws: returns the number of draws so far.
        where: returns the line of the model that is running.
    """

    draws: Callable[[], int]
    where: Callable[[], str | None]
    # What get_state returned, with the number of draws before it.
    _states: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed"):
            raise _outside(f"torch's default generator ({name})", self.where())
        return getattr(torch.default_generator, name)

    def get_state(self) -> torch.Tensor:
        self._states.append((torch.default_generator.get_state(), self.draws()))
        return self._states[-1][0]

    def set_state(self, state: torch.Tensor) -> None:
        if all(known is not state or at != self.draws() for known, at in self._states):
            raise _outside("torch's default generator (set_rng_state)", self.where())


TARGET = f"{python_draws.PythonDraw.__module__}.{python_draws.PythonDraw.__qualname__}.apply"
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
_INDEXED = ("__getitem__", "__setitem__")


class DrawnArray:
    """Stands for an array of random numbers, whose values are not known."""

    def __init__(self, tensor: torch.Tensor, refusal: TraceError) -> None:
        self.tensor = tensor
        self._refusal = refusal

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not name.startswith("__array"):
            raise AttributeError(name)
        raise self._refusal


class PythonRng(Interceptor):
    """Records functions that draw as one op each."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._running = False  # a function that draws, on real tensors

    @contextmanager
    def around(self) -> Iterator[None]:
        """Replaces the functions of the generators, and those of the user's that draw."""
        plain: Any = torch.from_numpy

        def from_numpy(ndarray: Any) -> Any:
            return ndarray.tensor if type(ndarray) is DrawnArray else plain(ndarray)

        drawing = [(sys.modules[home], name) for home, name in self.tape.assumed.drawing]
        places = [(*place, self._recording(getattr(*place))) for place in drawing]
        with python_draws.watched(self._drawn), patched(*places, (torch, "from_numpy", from_numpy)):
            yield

    def _recording(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the user's that draws, as one op."""

        @functools.wraps(function)
        def instead(*args: Any, **kwargs: Any) -> Any:
            if self._running or self.tape.within:
                return function(*args, **kwargs)
            own = f"{function.__module__}.{function.__name__}"
            return self._recorded(own, function, args, kwargs)

        return instead

    def _drawn(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a function of the generators."""
        if self._running or self.tape.within:
            return function(*args, **kwargs)
        frame = python_draws.drawing_frame(sys._getframe(2))
        if frame is None:
            return self._recorded(name, function, args, kwargs)
        own = python_draws.function_of(frame)
        places = {(str(frame.f_globals["__name__"]), frame.f_code.co_name)}
        caller = frame.f_back.f_globals if frame.f_back is not None else {}
        places |= {(str(caller["__name__"]), k) for k, v in caller.items() if v is own}
        assumed = self.tape.assumed
        if places <= assumed.drawing:
            raise self._refusal(frame.f_code.co_name)
        raise Refuted(replace(assumed, drawing=assumed.drawing | places))

    def _recorded(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tape, refusal = self.tape, self._refusal(name.rpartition(".")[2])
        tape.begin()
        drawn, made = self._example(function, args, kwargs)
        if made is None:
            raise refusal
        draw = tape.draw()
        with NoTorchFunction():
            fake = real_shapes.rebuilt(made, devices.HOST)
            tape.record("function", TARGET, "drawn", (name, args, kwargs), {}, fake, draw)
        if isinstance(drawn, torch.Tensor):
            return fake
        tape.handed_out = refusal
        return DrawnArray(fake, refusal)

    def _example(
        self, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, torch.Tensor | None]:
        """The result of the function for tensors of ones, and that as a tensor."""
        fakes = tensors_among((args, kwargs))
        self._running = True
        with no_dispatch_modes(), NoTorchFunction():
            reals = {id(t): torch.ones(t.shape, dtype=t.dtype) for t in fakes}
            try:
                with preserved_rng():
                    state = torch.default_generator.get_state()
                    drawn = real_shapes.called(function, args, kwargs, reals)
                    made = python_draws.as_tensor(drawn)
                    same = torch.equal(state, torch.default_generator.get_state())
            finally:
                self._running = False
        if not same:
            raise self._refusal(f"{function.__name__}, and from torch's generator")
        return drawn, made

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        if getattr(func, "__name__", "") in _INDEXED:
            return proceed(func, tuple(map(_tensor, args)), kwargs)
        if not any(type(each) is DrawnArray for each in args):
            return proceed(func, args, kwargs)
        if func in _MAKERS and len(args) == 1 and set(kwargs) <= {"dtype", "device"}:
            made = given = args[0].tensor
            if changes := {key: value for key, value in kwargs.items() if value is not None}:
                made = self.tape.call(torch.Tensor.to, (given,), changes)
            copied = func is torch.tensor and made is given
            return self.tape.call(torch.clone, (made,)) if copied else made
        raise self._refusal(refusals.name_of(func))

    def _refusal(self, name: str) -> TraceError:
        return refusals.error(refusals.OUTSIDE_VALUE, name, self.tape.where())


def _tensor(value: Any) -> Any:
    """An index with tensors in place of arrays."""
    return value.tensor if type(value) is DrawnArray else with_parts(value, _tensor)


class Arrays(Interceptor):
    """Tensors that are made of arrays (tables, grids) become constants.

    An array never comes from a fake tensor, which has no values.
    """

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        made: Any = None
        if func is torch.ops.aten.lift_fresh.default:  # the only call that torch.from_numpy shows
            made = args[0]
        elif func in _MAKERS and args and is_array(args[0]):
            with no_dispatch_modes(), NoTorchFunction():
                made = func(*args, **kwargs)
        if not isinstance(made, torch.Tensor) or isinstance(made, FakeTensor) or made.requires_grad:
            return proceed(func, args, kwargs)
        self.tape.table.fresh(made)
        return made
