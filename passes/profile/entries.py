"""A profile as data: measured costs by structural key, and the machine they belong to.

Ops with equal keys do the same work on equal operands, and are measured once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pdcompile import jsonio
from pdcompile.errors import CostError
from pdcompile.ir.graph import Op
from pdcompile.passes.costs import CostedOp, GraphIndex, Operand
from pdcompile.passes.costs.costed_op import described

SCHEMA = "pdcompile.profile/2"


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured of one kind of op."""

    key: str
    target: str  # for the reader
    forward_seconds: float
    backward_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of one machine at one microbatch size."""

    torch_version: str
    device: str
    microbatch_size: int
    entries: tuple[Entry, ...]
    schema: str = SCHEMA

    def to_json(self) -> str:
        """Readable strict JSON, the inverse of `from_json`."""
        return jsonio.dumps(self)

    @staticmethod
    def from_json(text: str | bytes, where: str = "profile.json") -> Profile:
        """Reads a profile; raises CostError for anything else: NaN, repeated keys, …"""
        data = jsonio.loads(text, where=where, error=CostError)
        found = jsonio.decode(Profile, data, where=where, error=CostError)
        found.validate(where)
        return found

    def validate(self, where: str) -> None:
        """Raises CostError for what no measuring gives: negative numbers, repeated keys, …"""
        if self.schema != SCHEMA:
            raise CostError(
                f"schema {self.schema!r} is not known",
                where=where,
                remedy=f"this version reads {SCHEMA!r}: measure again",
            )
        if self.microbatch_size < 1:
            raise CostError(
                f"microbatch_size is {self.microbatch_size}, and has to be positive", where=where
            )
        seen: set[str] = set()
        for i, entry in enumerate(self.entries):
            place = f"{where}: entries[{i}] ({entry.target})"
            if entry.key in seen:
                raise CostError(f"key {entry.key!r} appears twice", where=place)
            seen.add(entry.key)
            for name in ("forward_seconds", "backward_seconds"):
                if getattr(entry, name) < 0:
                    raise CostError(
                        f"{name} is negative", where=place, remedy="costs are 0 seconds or more"
                    )

    def save(self, path: str | Path) -> None:
        """Write to a file, all or nothing.  Raises CostError when it cannot be written."""
        target = Path(path)
        draft = target.with_name(target.name + ".tmp")
        try:
            draft.write_text(self.to_json(), encoding="utf-8")
            draft.replace(target)
        except OSError as error:
            raise CostError(
                f"cannot write the profile: {error.strerror}", where=str(path)
            ) from error

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Reads a file; raises CostError when it cannot be read or does not hold a profile."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise CostError(
                f"cannot read the profile: {error.strerror}",
                where=str(path),
                remedy='costs="measured" needs no file',
            ) from error
        return Profile.from_json(text, where=str(path))

    def check(self, *, torch_version: str, device: str, microbatch_size: int) -> None:
        """Raises CostError when it was measured elsewhere: it would rank ops wrongly."""
        for name, here in (
            ("torch_version", torch_version),
            ("device", device),
            ("microbatch_size", microbatch_size),
        ):
            there = getattr(self, name)
            if there != here:
                raise CostError(
                    f"the profile is stale: its {name} is {there}, here it is {here}",
                    remedy='measure again (costs="measured"), or use costs="estimated"',
                )


def structural_key(call: CostedOp) -> str:
    """A short digest of what the op is and of the shape, dtype and layout of all it reads.

    Names of values, parameters and modules are not in it: the layers of a deep model share
    their keys.  Opaque modules do not, since nothing is known of their insides.
    """
    op, index = call.op, call.index

    def value(name: str) -> str:
        kind = "tensor" if index.graph.values[name].is_tensor else "container"
        return kind + "+".join(_operand(leaf) for leaf in index.leaves(name))

    def tensor(fqn: str) -> str:
        operand = index.attribute(fqn)
        return _operand(operand) if operand is not None else fqn

    arguments = (op.args, op.kwargs, op.constructor)
    parts = [
        op.kind,
        op.target,
        op.module_path if op.kind == "opaque" else "",
        str(index.graph.training),
        str(op.grad_enabled),
        str(op.autocast),
        str(call.requires_grad),
        *(described(part, index.b, value, tensor) for part in arguments),
        _held(op, index),
        ",".join(_operand(output) for output in call.outputs),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _held(op: Op, index: GraphIndex) -> str:
    names = (*op.parameters, *op.buffers_read, *op.buffers_written)
    held = [index.attribute(fqn) for fqn in dict.fromkeys(names)]
    return ",".join(_operand(operand) for operand in held if operand is not None)


def _operand(operand: Operand) -> str:
    layout = f"~{operand.stride_order}" if operand.stride_order else ""
    return f"{operand.dtype}{operand.shape}{'g' if operand.requires_grad else ''}{layout}"
