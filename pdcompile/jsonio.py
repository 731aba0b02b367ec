"""Strict JSON to and from frozen dataclasses, and TOML as strict.

Python's own readers take NaN, Infinity, 1e999, repeated keys and numbers of any length, and a
dataclass takes anything; a plan that people edit deserves better.  Everything wrong is reported
with its place in the file, ``plan.json: stages[1].ops[3]``.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pdcompile.errors import PdcompileError, PlanError, did_you_mean
from pdcompile.files import MAX_BYTES

MAX_DEPTH = 64
#: metadata of a dataclass field that is written without defaults, its rows on one line each
COMPACT = {"compact": True}
_PLAIN = frozenset((str, int, float, bool, type(None)))  # written as it is
_written = json.JSONEncoder(allow_nan=False).encode  # json.dumps makes an encoder for each call
T = TypeVar("T")


class _Row(dict[str, Any]):
    """An object that is written on one line."""


class _Refused(ValueError):
    """Raised while a text is parsed; `loads` adds the file."""


def json_tree(text: str) -> Any:
    """JSON without repeated keys, NaN and infinity."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)


def toml_tree(text: str) -> Any:
    """TOML without keys of so many parts that they take time by the square of them."""
    if _LONG_KEY.search(text):
        raise _Refused(f"a key has more than {MAX_DEPTH} parts")
    return tomllib.loads(text)


_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_DEPTH}}}")


def loads(
    text: str | bytes, *, where: str, error: type[PdcompileError] = PlanError,
    remedy: str | None = None, parse: Callable[[str], Any] = json_tree,
) -> Any:  # fmt: skip
    """Parse strict JSON, or TOML as `toml_tree` does: no NaN or infinity, no repeated keys, at most
    64 MiB, 64 levels, and 63 bits a number.

    `remedy`: what to do where it is not.

    Raises:
        error: with the reason, and line and column where there is one.
    """
    try:
        if len(text) > MAX_BYTES:
            raise _Refused(f"the file has {len(text)} bytes, more than {MAX_BYTES}")
        text = text if isinstance(text, str) else text.decode("utf-8")
        data = parse(text)
        _check_tree(data)
    except RecursionError as wrong:
        raise error(f"nested deeper than {MAX_DEPTH} levels", where=where, remedy=remedy) from wrong
    except _Refused as wrong:
        raise error(str(wrong), where=where, remedy=remedy) from wrong
    except UnicodeDecodeError as wrong:
        raise error(
            "the file is not UTF-8 text",
            where=f"{where}: byte {wrong.start}",
            remedy=remedy or "save it as UTF-8",
        ) from wrong
    except json.JSONDecodeError as wrong:
        empty = not text.strip()
        reason = "the file is empty" if empty else f"not JSON: {wrong.msg.lower()}"
        place = f"{where}: line {wrong.lineno}, column {wrong.colno}"
        raise error(reason, where=place, remedy=remedy) from wrong
    except ValueError as wrong:  # TOMLDecodeError, and a number of thousands of digits
        kind = "TOML" if parse is toml_tree else "JSON"
        reason = f"the file is not {kind}: {str(wrong).lower()}"
        raise error(reason, where=where, remedy=remedy) from wrong
    return data


def decode(kind: type[T], data: Any, *, where: str, error: type[PdcompileError] = PlanError) -> T:
    """An instance of the dataclass `kind` from parsed JSON, every type checked.

    Fields with a default may be left out; unknown ones are refused.  An int is taken for a
    float, nothing else is converted.
    """
    result: T = _decode(kind, data, where + ":", error)
    return result


def encode(value: Any, compact: type[dict[str, Any]] | None = None) -> Any:
    """Dataclasses to dicts (fields in order), tuples to lists; the inverse of `decode`.

    A field with the metadata `COMPACT` is left out where it has its default, and so are the
    fields below it: an infinite default, which JSON has no number for, is never written.
    `compact`: what a dataclass below such a field becomes; None: it is not below one.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    below = _Row if compact else None
    if (own := _fields_of(kind)) is not None:
        result = (compact or dict)()
        for name, begins, default in own:
            part = getattr(value, name)
            if part != default or not (compact or begins):
                result[name] = encode(part, dict if begins and not compact else below)
        return result
    if isinstance(value, tuple | list):
        return [encode(part, below) for part in value]
    if isinstance(value, dict) and kind is not _Row:
        return {key: encode(part, below) for key, part in value.items()}
    return value


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, bool, Any], ...] | None:
    """(name, whether it is written compactly, default) of each field; None: no dataclass."""
    if not is_dataclass(kind):
        return None
    return tuple((f.name, bool(f.metadata.get("compact")), f.default) for f in fields(kind))


def dumps(value: Any) -> str:
    """Readable JSON: one field a line, lists of plain values in lines of at most 100 columns."""
    return _dump(encode(value), 0) + "\n"


def canonical(value: Any) -> bytes:
    """One line, keys sorted: what hashes are taken of."""
    text = json.dumps(encode(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Refused(f"key {_short(key)} appears twice in one object")
        result[key] = value
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused(f"{text[:40]} is not a JSON number, or too large")
    return number


def _check_tree(data: Any) -> None:
    """Depth, numbers, and text that no file could hold (half a surrogate pair)."""
    stack = [(data, 1)]
    while stack:
        part, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(part, dict):
            stack += [(key, depth) for key in part]
            stack += [(item, depth + 1) for item in part.values()]
        elif isinstance(part, list):
            stack += [(item, depth + 1) for item in part]
        elif isinstance(part, int) and not -(2**63) < part < 2**63:
            raise _Refused(f"number {str(part)[:40]} has more than 63 bits")
        elif isinstance(part, str) and re.search("[\ud800-\udfff]", part):
            raise _Refused(f"text {_short(part)} holds half a surrogate pair")


def _decode(kind: Any, data: Any, where: str, error: type[PdcompileError]) -> Any:
    if kind is Any:
        return data
    if is_dataclass(kind):
        return _decode_dataclass(kind, data, where, error)
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise _mismatch(data, "a list", where, error)
        if args[-1] is not Ellipsis:
            if len(data) != len(args):
                raise _mismatch(data, f"a list of {len(args)}", where, error)
            pairs = zip(args, data, strict=True)
            return tuple(_decode(k, v, f"{where}[{i}]", error) for i, (k, v) in enumerate(pairs))
        return tuple(_decode(args[0], item, f"{where}[{i}]", error) for i, item in enumerate(data))
    if origin is Literal:
        if data not in args or not isinstance(data, str):
            choices = ", ".join(f'"{choice}"' for choice in args)
            raise _mismatch(data, f"one of {choices}", where, error)
        return data
    if origin in (Union, types.UnionType):  # "something or None", "one or a tuple of them"
        if data is None and type(None) in args:
            return None
        listed = isinstance(data, list) and any(get_origin(one) is tuple for one in args)
        return _decode(args[-1] if listed else args[0], data, where, error)
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not (origin or kind):  # dict[str, Any] has whatever values
        raise _mismatch(data, _NAMES[origin or kind], where, error)
    return data


def _decode_dataclass(kind: Any, data: Any, where: str, error: type[PdcompileError]) -> Any:
    if not isinstance(data, dict):
        raise _mismatch(data, "an object", where, error)
    place = where.removesuffix(":")
    hints = hints_of(kind)
    known = {field.name: field for field in fields(kind)}
    for key in data:
        if key not in known:
            remedy = did_you_mean(key, known) + f"remove it; known keys are {', '.join(known)}"
            raise error(f"unknown key {_short(key)}", where=place, remedy=remedy)
    for name, field in known.items():
        optional = field.default is not MISSING or field.default_factory is not MISSING
        if name not in data and not optional:
            raise error(f"key {name!r} is missing", where=place, remedy=f"add {name!r}")
    parts = {key: _decode(hints[key], data[key], _below(where, key), error) for key in data}
    return kind(**parts)


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields: evaluating them takes longer than decoding a row."""
    return get_type_hints(kind)


_NAMES = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "an object",
}  # fmt: skip


def _mismatch(data: Any, expected: str, where: str, error: type[PdcompileError]) -> PdcompileError:
    place = where.removesuffix(":")
    return error(f"{_short(data)} is not {expected}", where=place, remedy=f"write {expected}")


def _below(where: str, key: str) -> str:
    return f"{where} {key}" if where.endswith(":") else f"{where}.{key}"


def _short(data: Any) -> str:
    text = json.dumps(data, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _dump(value: Any, indent: int) -> str:
    inner = " " * (indent + 1)
    if isinstance(value, dict) and value and not isinstance(value, _Row):
        rows = [f"{_written(k)}: {_dump(v, indent + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(inner + row for row in rows) + "\n" + " " * indent + "}"
    if not isinstance(value, list) or not value:
        return _written(value)
    if any(isinstance(item, dict | list) for item in value):
        rows = [_dump(item, indent + 1) for item in value]
        return "[\n" + ",\n".join(inner + row for row in rows) + "\n" + " " * indent + "]"
    words = list(map(_written, value))
    if len(line := "[" + ", ".join(words) + "]") + indent <= 80:
        return line
    lines = [inner]
    for word in words:
        if len(lines[-1]) + len(word) > 95 and lines[-1].strip():
            lines.append(inner)
        lines[-1] += word + ", "
    return "[\n" + "\n".join(map(str.rstrip, lines)).rstrip(",") + "\n" + " " * indent + "]"
