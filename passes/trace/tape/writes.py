"""The values and buffers that one op writes in place."""

from __future__ import annotations

from pdcompile.ir.graph import Argument, Ref, walk
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors


def written_tensors(fakes: FakeTensors, written: set[int], source: str) -> tuple[str, ...]:
    """Canonical FQNs of the buffers in written storages.

    Raises:
        TraceError: a parameter is written, or a buffer that shares its memory with another one.
    """
    fqns = fakes.model_tensors_at(written)
    for fqn in fqns:
        info = fakes.table.tensors[fqn]
        if info.kind != "buffer":
            raise refusals.error(refusals.WRITTEN[info.kind], fqn, source)
        other = fakes.table.shares_memory(fqn)
        if other is not None:
            raise refusals.error(refusals.SHARED_BUFFER, f"{fqn} (shared with {other})", source)
    fakes.findings.written.update(fqns)
    return tuple(fqns)


def mutated(fakes: FakeTensors, written: set[int], arguments: Argument) -> tuple[str, ...]:
    """Values in written storages: those among the arguments, else the newest of each storage."""
    names = dict.fromkeys(ref.name for ref in walk(arguments, Ref))
    found = [name for name in names if fakes.storage_of(name) in written]
    covered = {fakes.storage_of(name) for name in found}
    found += fakes.values_at(written - covered)
    return tuple(found)
