"""Damaged files: the mutations that make one of a file that is whole.

Each takes bytes and a `random.Random` and gives bytes.  Those of trees read JSON or TOML, change
values and keys where they stand, and write the text again; what cannot be read is changed as text.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

#: texts that readers have stumbled over, or that would do something if they were executed
TEXTS = (
    "", " ", ".", "..", "/", "\x00", "\n", "\x7f", "\ud800", "é", "²", "٣", "𝟘", "--1", "1_000",
    "nan", "inf", "-inf", "1e999", "1e-999", "0x10", "-0", "True", "null", "None", "self",
    "../../etc/passwd", "/etc/passwd", "../x.safetensors", "\x00.safetensors", "a/b.safetensors",
    "a.csv", "mine: 0F0 0B0", "mine: 0F0 0B0 | 1F0 1B0", "a: 0F999999999", ":", "b", "2*b+1",
    "__import__('os').system('touch ran')", "os.system", "torch.load", "torch.from_file",
    "torch.ops.aten.from_file", "builtins.exec", "subprocess.run", "_inductor", "onnx",
    "from_numpy", "__class__", "__init__", "f'{1}'", "{0.__class__}", "%s", "'''", '"', "\\",
    "16 GB", "1e400 GB", "-1 B", "100 GB/s", "5 us", "0 B/s", "9" * 5000, "a" * 3000, "a." * 300,
)  # fmt: skip
#: numbers and tokens at the ends of what a format or a machine has
NUMBERS = (
    "0", "-0", "-0.0", "-1", "1", "2", "3", "7", "0.5", "1e-300", "5e-324", "1e308", "1.0", "65536",
    "65537", "2147483648", "4294967296", "9223372036854775807", "-9223372036854775808",
    "9223372036854775808", "1000000000000000000000", "9" * 400, "9" * 5000,
)  # fmt: skip
NO_JSON = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "+1", "'a'", "undefined", "")
NO_TOML = (
    "nan", "inf", "-inf", "1e999", "0xff", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "'a'",
    '"""a"""', "", "9999-99-99",
)  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """Text that is written as it is."""

    text: str


class Object(list[list[Any]]):
    """An object as [key, value] pairs: a key may be there twice."""


def chain(*mutations: Mutation) -> Mutation:
    """One of some mutations, or several after another."""

    def apply(data: bytes, draw: random.Random) -> bytes:
        for _ in range(draw.choice((1, 1, 1, 1, 2))):
            data = draw.choice(mutations)(data, draw)
        return data

    return apply


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flips bits, and inserts, removes, repeats and cuts runs of bytes."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(found) + 1)
        end = min(len(found), at + draw.choice((1, 1, 2, 8, 64)))
        match draw.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << draw.randrange(8)
            case 1:
                found[at:at] = draw.randbytes(draw.choice((1, 1, 2, 8)))
            case 2:
                del found[at:end]
            case 3:
                found[at:at] = found[at:end] * draw.choice((1, 1, 2, 50))
            case 4 if draw.random() < 0.3:
                del found[at:]
            case _:
                found[at:end] = draw.choice((b"\xff", b"\x00", b"\xef\xbb\xbf", b"\r", b"[", b"{"))
    return bytes(found)


def of_text(data: bytes, draw: random.Random) -> bytes:
    """Swaps, repeats, removes and replaces words, signs and lines."""
    text = data.decode("utf-8", "replace")
    lines = draw.random() < 0.3
    parts = text.splitlines(keepends=True) if lines else re.findall(r"\w+|\s+|[^\w\s]", text)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, other = (draw.randrange(len(parts) + 1) for _ in range(2))
        match draw.randrange(5):
            case 0:
                parts[at:at] = parts[other : other + draw.choice((1, 2, 5))]
            case 1:
                del parts[at : at + draw.choice((1, 1, 3))]
            case 2 if parts:
                parts[min(at, other, len(parts) - 1)] = draw.choice(TEXTS)
            case 3 if parts:
                parts[min(at, len(parts) - 1)] = draw.choice(NUMBERS)
            case _:
                parts[at:at] = [draw.choice((*TEXTS, "\t", "\n", " -- ", ",", ";", "[", "(", ")"))]
    return "".join(parts).encode("utf-8", "surrogatepass")


def of_json(data: bytes, draw: random.Random) -> bytes:
    """Changes values, keys and lengths of lists in JSON."""
    try:
        tree = json.loads(data, object_pairs_hook=_object)
        tree = _changed(tree, draw, NO_JSON)
        return _json(tree).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return of_text(data, draw)


def of_toml(data: bytes, draw: random.Random) -> bytes:
    """The same in TOML; tables are written inline."""
    try:
        changed = _changed(_pairs(tomllib.loads(data.decode())), draw, NO_TOML)
        if not isinstance(changed, Object):
            changed = Object([["devices", changed]])
        lines = (f"{_toml_key(key)} = {_toml(value)}\n" for key, value in changed)
        return "".join(lines).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return of_text(data, draw)


def of_safetensors(data: bytes, draw: random.Random) -> bytes:
    """Changes the JSON before the tensors, and mostly the length that says where it ends."""
    size = int.from_bytes(data[:8], "little")
    header = of_json(data[8 : 8 + size], draw)
    length = len(header) if draw.random() < 0.8 else draw.choice((0, 1, 2**63, 2**64 - 1, size))
    return length.to_bytes(8, "little") + header + data[8 + size :]


def _object(pairs: list[tuple[str, Any]]) -> Object:
    return Object([key, value] for key, value in pairs)


def _pairs(tree: Any) -> Any:
    if isinstance(tree, dict):
        return Object([key, _pairs(value)] for key, value in tree.items())
    if isinstance(tree, list):
        return [_pairs(value) for value in tree]
    return tree if isinstance(tree, str | int | float) else Raw(str(tree))


def _changed(tree: Any, draw: random.Random, raw: tuple[str, ...]) -> Any:
    """The tree after some changes at places that are drawn evenly."""
    holder = [tree]
    for _ in range(draw.choice((1, 1, 1, 1, 2, 4))):
        places = list(_places(holder))
        owner, index = draw.choice(places)
        if draw.random() < 0.5:
            _replace(owner, index, places, draw)
        else:
            _change(owner, index, places, draw, raw)
    return holder[0] if holder else Raw("")


def _places(holder: list[Any]) -> list[tuple[list[Any], int]]:
    """(list, index) of every value; of objects, the pair and 1."""
    found = []
    stack: list[tuple[list[Any], int]] = [(holder, i) for i in range(len(holder))]
    while stack:
        owner, index = stack.pop()
        found.append((owner, index))
        value = owner[index]
        if isinstance(value, Object):
            stack += [(pair, 1) for pair in value]
        elif isinstance(value, list):
            stack += [(value, i) for i in range(len(value))]
    return found


def _replace(
    owner: list[Any], index: int, places: list[tuple[list[Any], int]], draw: random.Random
) -> None:
    """Put another value of the same type there: types are right, what they say may not be."""
    kind = type(owner[index])
    alike = [there[at] for there, at in places if type(there[at]) is kind]
    other: Any = _copied(draw.choice(alike))
    if kind is int:
        other = draw.choice((other, owner[index] + 1, owner[index] - 1, 0, 1, 2, 2**40, -1))
    elif kind is float:
        other = draw.choice((other, owner[index] * 2, owner[index] / 2, 0.0, 1e300, 5e-324, -1.0))
    elif kind is bool:
        other = not owner[index]
    owner[index] = other


def _change(
    owner: list[Any],
    index: int,
    places: list[tuple[list[Any], int]],
    draw: random.Random,
    raw: tuple[str, ...],
) -> None:
    value = owner[index]
    if isinstance(value, list) and value and draw.random() < 0.5:  # of its length or keys
        at, other = draw.randrange(len(value)), draw.randrange(len(value))
        match draw.randrange(5):
            case 0:
                del value[at]
            case 1:
                value.insert(other, _copied(value[at]))
            case 2:
                value[at], value[other] = value[other], value[at]
            case 3 if isinstance(value, Object):
                value[at][0] = draw.choice((*TEXTS, value[other][0], value[at][0] + "_"))
            case _:
                value[at:] = []
        return
    match draw.randrange(8):
        case 0:
            owner[index] = draw.choice(TEXTS)
        case 1:
            owner[index] = Raw(draw.choice(NUMBERS))
        case 2:
            owner[index] = Raw(draw.choice(raw))
        case 3:
            there, other = draw.choice(places)
            owner[index] = _copied(there[other])
        case 4:
            owner[index] = draw.choice((True, False, Raw("null"), [], Object(), [[]], [value]))
        case 5 if isinstance(value, str):
            cut = draw.randrange(len(value) + 1)
            owner[index] = value[:cut] + draw.choice(TEXTS) + value[cut:]
        case 6 if isinstance(value, int | float) and not isinstance(value, bool):
            half = value / 2 if abs(value) < 2**1000 else value // 2  # as far as a float goes
            owner[index] = draw.choice((value + 1, value - 1, -value, value * 2, half))
        case 7 if draw.random() < 0.2:
            deep = draw.choice((63, 64, 65, 3000))
            owner[index] = Raw("[" * deep + "]" * deep)
        case _:
            owner[index] = Object([[draw.choice(TEXTS), _copied(value)]])


def _copied(value: Any) -> Any:
    if isinstance(value, Object):
        return Object([key, _copied(part)] for key, part in value)
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _json(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Object):
        pairs = (f"{json.dumps(key)}: {_json(value)}" for key, value in tree)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_json, tree)) + "]"
    return json.dumps(tree, ensure_ascii=True)


def _toml(tree: Any) -> str:
    if isinstance(tree, Object):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_toml, tree)) + "]"
    return tree.text if isinstance(tree, Raw) else json.dumps(tree, ensure_ascii=False)


def _toml_key(key: str) -> str:
    bare = re.fullmatch(r"[A-Za-z0-9_.-]+", key)
    return key if bare else json.dumps(key, ensure_ascii=False)
