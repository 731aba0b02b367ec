"""Calls of modules: leaves of torch.nn and opaque modules are one op each, the latter with results
like those of the observed call; all of them name the values that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdcompile.eager.randomness import CallKey, is_random_module
from pdcompile.errors import TraceError
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.stages.naming import below
from pdcompile.passes.trace import real_shapes, refusals
from pdcompile.passes.trace.opaque.probe import Made
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed
from pdcompile.passes.trace.tape.observer import storage_key
from pdcompile.passes.trace.tape.results import with_items
from pdcompile.releases.torch_internals import NoTorchFunction


class LeafModules(Interceptor):
    """Records leaf modules that behave like their class as one op each."""

    def module(
        self, call: CallKey, plain: Callable[..., Any], args: Any, kwargs: Any, proceed: Proceed
    ) -> Any:
        tape, path = self.tape, call[0]
        module = tape.table.modules[path]
        inside = path and tape.region == "forward"
        if not inside or tape.table.constructor(path, tape.training) is None:
            return proceed(call, plain, args, kwargs)
        with tape.running(call):
            draw = tape.draw() if is_random_module(module) else None
            tape.begin()
            with tape.inside(), refusals.as_refusals(module):
                result = real_shapes.run(
                    plain,
                    tape.fakes.faked(args),
                    tape.fakes.faked(kwargs),
                    closed=not any(True for _ in (*module.parameters(), *module.buffers())),
                )
            with NoTorchFunction():
                target = tape.table.classes[path][0]
                return tape.record("module", target, path, args, kwargs, result, draw)


class ArgumentNames(Interceptor):
    """Notes, at the first call of each module, under which name it takes each value."""

    def module(
        self, call: CallKey, plain: Callable[..., Any], args: Any, kwargs: Any, proceed: Proceed
    ) -> Any:
        path, number = call
        if number == 0 and path and self.tape.region == "forward":
            self.tape.passed[path] = self._names(path, args, kwargs)
        return proceed(call, plain, args, kwargs)

    def _names(self, path: str, args: Any, kwargs: Any) -> dict[str, str]:
        try:
            signature = inspect.signature(self.tape.table.modules[path].forward)
            given = signature.bind(*args, **kwargs).arguments
        except (TypeError, ValueError):  # the call will say so
            return {}
        known, found = self.tape.fakes.value_names, dict[str, str]()
        for name, value in given.items():
            if id(value) in known:
                found.setdefault(known[id(value)], name)
        return found


class OpaqueCalls(Interceptor):
    """Records calls of opaque modules; refuses calls of their parts from outside."""

    def module(
        self, call: CallKey, plain: Callable[..., Any], args: Any, kwargs: Any, proceed: Proceed
    ) -> Any:
        tape, path = self.tape, call[0]
        observed = tape.opaque.get(call)
        if observed is None:
            self._refuse_part(path)
            return proceed(call, plain, args, kwargs)
        if observed.reason:
            raise TraceError(f"{path!r} cannot be opaque: it {observed.reason}", where=tape.where())
        tape.begin()
        with NoTorchFunction():
            with tape.inside():
                inputs = tensors_among(tape.fakes.faked((args, kwargs)))
                outputs: list[Tensor] = []
                for made in observed.made:
                    outputs.append(_fake(made, inputs, outputs, observed.made, tape.fakes.device))
                result = _filled(observed.result, iter(outputs))
                buffers = [tape.table.objects[fqn] for fqn in observed.buffers]
                tape.observer.clear()
                tape.observer.written = {storage_key(tape.fakes.faked(b)) for b in buffers}
            with tape.running(call, opaque=True):
                target = tape.table.classes[path][0]
                return tape.record(
                    "opaque", target, path, args, kwargs, result, None, returns=observed.form,
                    hooks=observed.hooks, flops=observed.flops, saved_bytes=observed.saved_bytes,
                    rebinds=observed.rebinds,
                )  # fmt: skip

    def _refuse_part(self, path: str) -> None:
        for owner, _ in self.tape.opaque:
            if path != owner and below(path, owner):
                raise TraceError(
                    f"{path!r} runs outside of {owner!r}, which has to be opaque",
                    where=self.tape.where(),
                    remedy=f"call it only in the forward of {owner!r}",
                )


def _fake(
    made: Made,
    inputs: list[Tensor],
    outputs: list[Tensor],
    others: tuple[Made, ...],
    device: torch.device,
) -> Tensor:
    if made.shares is None:
        # As large as its whole storage, and not a leaf: it may be written in place.
        index = len(outputs)
        same = [made, *(other for other in others if other.shares == ("output", index))]
        base = torch.empty(max(_end(one) + one.offset for one in same) + made.offset,
                           dtype=made.dtype, device=device)  # fmt: skip
        if any(one.requires_grad for one in same):
            base = base.requires_grad_().clone()
        offset = made.offset
    else:
        kind, index = made.shares
        base = inputs[index] if kind == "input" else outputs[index]
        offset = made.offset + int(base.storage_offset())
    fake = base.as_strided(made.shape, made.stride, offset)
    return fake if fake.requires_grad == made.requires_grad else fake.detach()


def _end(made: Made) -> int:
    if 0 in made.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(made.shape, made.stride, strict=True))


def _filled(result: Any, outputs: Any) -> Any:
    """The same structure with fakes for its tensors."""
    if isinstance(result, Tensor):
        return next(outputs)
    return with_items(result, lambda _, item: _filled(item, outputs))
