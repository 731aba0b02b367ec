"""Lines of source: indentation, comments, and folding to 100 columns; files that are templates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template

from pdcompile.ir.graph import Size, Value
from pdcompile.ir.graph_text import format_shape

WIDTH = 100
_SHORT_PART = 48  # columns: shorter arguments share lines, where one line does not hold all


@dataclass(frozen=True, slots=True)
class Line:
    """One statement (or a comment alone, or an empty line), `depth` levels deep."""

    code: str = ""
    comment: str = ""
    depth: int = 0

    def deeper(self, levels: int = 1) -> Line:
        return replace(self, depth=self.depth + levels)


def filled(template: Path, kept: Mapping[str, bool], words: Mapping[str, object]) -> str:
    """A template with words in the place of ``$names``, which are never looked through; of lines
    between ``#if name`` and ``#end``, or another ``#if``, those whose name is kept."""
    lines, keeps = [], True
    for line in template.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("#if "):
            keeps = kept[line.split()[1]]
        elif line == "#end\n":
            keeps = True
        elif keeps:
            lines.append(line)
    return Template("".join(lines)).substitute(words)


def clean(text: str, limit: int = 60) -> str:
    """Text of a model for a comment or docstring: printable ASCII, and nothing that ends one."""
    plain = "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in text)
    return plain if len(plain) <= limit else f"{plain[: limit - 3]}..."


@dataclass(slots=True)
class Locations:
    """Short source locations for comments; `files` are those that were referred to."""

    files: dict[str, str] = field(default_factory=dict)  # shown -> path

    def short(self, source: str) -> str:
        """``modeling_gpt2.py:412``, with folders where another file has the same name."""
        path, _, line = source.rpartition(":")
        if not path or not line.isdecimal():
            return clean(source)
        parts = [clean(part, 44) for part in path.replace("\\", "/").split("/")]
        full = "/".join(parts)
        for count in range(1, len(parts) + 1):
            shown = "/".join(parts[-count:])
            if self.files.setdefault(shown, full) == full:
                return f"{shown}:{line}"
        return f"{full}:{line}"


def value_text(value: Value | None, shape: Iterable[Size | str] | None = None) -> str:
    """`shape`, or the value's own, with its dtype; "" for anything but a tensor."""
    if value is None or not value.is_tensor:
        return ""
    return format_shape(value.shape if shape is None else shape, value.dtype)


def render(lines: Iterable[Line]) -> str:
    """The source text: every line at most 100 columns, no trailing blanks."""
    done: list[str] = []
    for line in lines:
        indent = "    " * line.depth
        if not line.code:
            done.append(f"{indent}# {line.comment}"[:WIDTH].rstrip() if line.comment else "")
            continue
        folded = fold(line.code, line.depth)
        comment = f"  # {line.comment}" if line.comment else ""
        if comment and len(folded[-1]) + len(comment) <= WIDTH:
            folded[-1] += comment
        done += folded
    return "\n".join(done) + "\n"


def fold(code: str, depth: int) -> list[str]:
    """One statement as lines of at most 100 columns, the way formatters break calls: at the last
    brackets that leave both ends short enough; what has none stays in one line."""
    indent = "    " * depth
    if len(indent) + len(code) <= WIDTH:
        return [indent + code]
    broken = (_break_brackets(code, depth, *span) for span in reversed(_brackets(code)))
    whole = _moved(code, depth) or [indent + code]
    return _break_targets(code, depth) or next(filter(None, broken), whole)


def _moved(code: str, depth: int) -> list[str] | None:
    """``name = (value)`` with the value on a line of its own, where that is long enough."""
    indent, assigned = "    " * depth, _assigned(code)
    if not assigned or len(code) - assigned + len(indent) + 4 > WIDTH:
        return None
    return [indent + code[:assigned] + "(", f"{indent}    {code[assigned:]}", indent + ")"]


def _break_targets(code: str, depth: int) -> list[str] | None:
    """``(a, b, …) = value`` with the targets on lines of their own, where they are long."""
    indent, assigned = "    " * depth, _assigned(code)
    targets = _split_commas(code[: max(assigned - 3, 0)])
    if len(targets) < 2 or len(indent) + assigned <= WIDTH - 24 or code.startswith("("):
        return None
    first, *rest = fold(f"_ = {code[assigned:]}", depth)
    parts = _filled([f"{target}," for target in targets], f"{indent}    ")
    return [f"{indent}(", *parts, first.replace("_", ")", 1), *rest]


def _break_brackets(code: str, depth: int, start: int, stop: int) -> list[str] | None:
    """Breaks after the opening bracket at start and before its closing one at stop."""
    head, inner, tail = code[: start + 1], code[start + 1 : stop], code[stop:]
    indent = "    " * depth
    assigned = _assigned(code)
    if tail.strip(")]}") and 0 < assigned < start and (moved := _moved(code, depth)):
        return moved  # the brackets are not the end of it
    if inner and 0 < assigned < start and len(head) + len(indent) > WIDTH >= assigned + len(indent):
        return [indent + code[:assigned] + "(", *fold(code[assigned:], depth + 1), indent + ")"]
    if not inner or max(len(head), len(tail)) + len(indent) > WIDTH:
        return None
    if len(inner) + len(indent) + 4 <= WIDTH:
        return [indent + head, f"{indent}    {inner}", indent + tail]
    parts = _split_commas(inner)
    if len(parts) > 1 or inner.endswith(","):
        parts = [f"{part}," for part in parts]
    if len(parts) > 1 and max(map(len, parts)) <= _SHORT_PART:
        return [indent + head, *_filled(parts, f"{indent}    "), indent + tail]
    lines = [indent + head]
    for part in parts:
        lines += fold(part, depth + 1)
    return [*lines, indent + tail]


def _filled(parts: Iterable[str], indent: str) -> list[str]:
    """Lines of as many parts as each holds."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 1 + len(part) <= WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(indent + part)
    return lines


def _assigned(code: str) -> int:
    """Position at which the right-hand side of an assignment begins; 0 if it is none."""
    for position, char, level in _with_levels(code):
        if char == "=" and not level and code[position - 1 : position + 2] == " = ":
            return position + 2
    return 0


def _brackets(code: str) -> list[tuple[int, int]]:
    """Positions of the top-level brackets that hold something, opening and closing."""
    found, start = [], 0
    for position, char, level in _with_levels(code):
        if char in "([{" and level == 1:
            start = position
        elif char in ")]}" and not level and position > start + 1:
            found.append((start, position))
    return found


def _split_commas(inner: str) -> list[str]:
    parts, start = [], 0
    for position, char, level in _with_levels(inner):
        if char == "," and not level:
            parts.append(inner[start:position].strip())
            start = position + 1
    return [*parts, last] if (last := inner[start:].strip()) else parts


def _with_levels(code: str) -> Iterator[tuple[int, str, int]]:
    """Characters outside of strings with their positions and the open brackets after them."""
    quote, level = "", 0
    characters = iter(enumerate(code))
    for position, char in characters:
        if quote:
            if char == "\\":
                next(characters, None)
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        else:
            level += (char in "([{") - (char in ")]}")
            yield position, char, level
