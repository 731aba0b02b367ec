"""Non-finite values: the first op that makes one, under ``detect_nonfinite=True``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdcompile.errors import NonFiniteError
from pdcompile.releases.torch_internals import TorchDispatchMode, pytree
from pdcompile.schedule import Action, Instruction, Phase
from pdcompile.warn import warn

if TYPE_CHECKING:
    from pdcompile.runtime.interpreter import Worker
    from pdcompile.runtime.stage.compute import Feed

_UNINITIALISED = ("empty", "new_empty", "resize", "set_")


class NonFiniteCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at what every op gets and makes, several times as slow as the step itself.

    Refused is an op that makes NaN of values without it, and infinity of finite ones where nobody
    means it: in a backward, in an update, and as a scalar, which a loss is.  Elsewhere in a forward
    it may be meant, as in masks before a softmax.

    Args:
        workers: those of this process, one of which runs an instruction.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workers = workers
        self._given: dict[tuple[int, int, bool], list[tuple[str, str]]] = {}
        self._infinity = ""  # the last op of a forward that made infinity of finite values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = _floats((args, kwargs))
        no_nan = not any(_has(torch.isnan, one) for one in before)
        finite = no_nan and not any(_has(torch.isinf, one) for one in before)
        made = func(*args, **kwargs)
        name = str(func.name()).rpartition("::")[2]
        for one in () if name.startswith(_UNINITIALISED) else _floats(made):
            nan = _has(torch.isnan, one)
            if not nan and not _has(torch.isinf, one):
                continue
            new = no_nan if nan else finite
            kind, shape = "NaN" if nan else "infinity", tuple(one.shape)
            text = f"{name} made {kind}, in a result of shape {shape}"
            if (new and nan) or (new and self._exact) or not one.dim():
                raise self._error(text, new=new, nan=nan)
            self._infinity = text if new else self._infinity
        return made

    @property
    def _exact(self) -> bool:
        """True if nobody means infinity in what runs now."""
        action = None if self._current is None else self._current.action
        return action not in (None, Action.FORWARD) and action.phase is Phase.COMPUTE

    @property
    def _current(self) -> Instruction | None:
        return next((w.current for w in self._workers if w.current is not None), None)

    def _error(self, text: str, *, new: bool, nan: bool) -> NonFiniteError:
        where, why = None, " of values without it"
        if not new and self._infinity and not nan:
            why = f"; before, of finite values, {self._infinity}"
        elif not new:
            where, had = next(self._sources(nan), (None, "a value of another stage had it"))
            text, why = had, f": {text}"
        return NonFiniteError(
            text + why,
            where=where,
            remedy="look at what goes into this op: a division by 0, a log or square root at 0, an "
            "overflow (of float16, or where the learning rate is too high), the minibatch",
        )

    def _sources(self, nan: bool) -> Iterator[tuple[str, str]]:
        """Inputs of the microbatch that runs now, then weights, that have NaN or infinity: each
        with what it has."""
        ins = self._current
        if ins is not None:
            place = self._workers[0].base + ins.minibatch, ins.microbatch
            yield from self._given.get((*place, nan), ())
        for worker in self._workers:
            yield from _strange(worker.weights.named(), nan)

    def take(self, feeds: Sequence[Feed], *, warns: bool) -> None:
        """Look at a minibatch before stages use up what they are given.

        `warns`: of NaN, as another rank, which has other inputs, finds what becomes of it.
        """
        for feed, nan in product(feeds, (True, False)):
            for microbatch, leaves in enumerate(feed.leaves):
                found = list(_strange(leaves, nan))
                self._given.setdefault((feed.minibatch, microbatch, nan), []).extend(found)
                for _, had in found if nan and warns else ():
                    place = f"minibatch {feed.minibatch}, microbatch {microbatch}"
                    warn(f"{place}: {had}", RuntimeWarning)


def _strange(values: Mapping[str, Any], nan: bool) -> Iterator[tuple[str, str]]:
    """The tensors with NaN or infinity, by name, each with a sentence that says where."""
    for name, value in values.items():
        for one in _floats(value):
            places = torch.nonzero((torch.isnan if nan else torch.isinf)(one.detach()))
            if len(places):
                what = f"{'NaN' if nan else 'infinity'} at {places[0].tolist()}"
                more = f" and {len(places) - 1} other places" if len(places) > 1 else ""
                yield name, f"{name} has {what}{more}"


def _has(strange: Callable[[Tensor], Tensor], values: Tensor) -> bool:
    return bool(strange(values).any())


def _floats(tree: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
