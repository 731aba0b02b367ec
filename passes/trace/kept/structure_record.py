"""The structure of a model's output as plain JSON, and back.

Classes are written by name and looked up among the loaded modules: reading imports nothing and
calls nothing of theirs.  A class whose objects do something when they are deleted is not rebuilt.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from typing import Any

from pdcompile.batch.structure import Again, Constant, Instance, Part, Tree
from pdcompile.releases.torch_internals import pytree

NAMED = "namedtuple"  # for all of which torch has one entry
_BASES: dict[str, type] = {"object": object, "dict": dict, "list": list, "tuple": tuple}
_KEYS = (str, int, float, bool, type(None))


class NotWritten(Exception):
    """Raised for a structure that has no form in JSON, or a text that is no structure."""


def to_record(tree: Tree) -> Any:
    """Raises NotWritten: it holds objects that a file cannot stand for."""
    found = {"spec": _spec(tree.spec), "parts": [_part(part) for part in tree.parts]}
    if from_record(found) != tree:
        raise NotWritten("the structure of the model's output changes when it is written")
    return found


def from_record(data: Any) -> Tree:
    """The structure that `to_record` wrote.  Raises NotWritten: it is none, or of other classes."""
    if not isinstance(data, dict) or set(data) != {"spec", "parts"}:
        raise NotWritten("not the structure of an output")
    spec, parts = _read_spec(data["spec"]), data["parts"]
    if not isinstance(parts, list) or len(parts) != spec.num_leaves:
        raise NotWritten("the structure of an output has other parts than leaves")
    return Tree(spec, tuple(_read_part(part) for part in parts))


def _spec(spec: Any) -> Any:
    if spec.is_leaf():
        return None
    context: Any = spec.context
    if pytree.is_namedtuple_class(context):
        context = {"class": _name(context)}
    elif not _is_plain(context):
        raise NotWritten(f"the model returns a {spec.type.__name__} of keys that are no texts")
    children = [_spec(child) for child in spec.children()]
    kind = NAMED if spec.type is namedtuple else _name(spec.type)
    return {"class": kind, "context": context, "children": children}


def _read_spec(data: Any) -> Any:
    if data is None:
        return pytree.treespec_leaf()
    if not isinstance(data, dict) or set(data) != {"class", "context", "children"}:
        raise NotWritten("not a node of a structure")
    kind = namedtuple if data["class"] == NAMED else _class(data["class"])
    context, children = data["context"], data["children"]
    if isinstance(context, dict):
        context = _class(context.get("class"))
    if kind not in pytree.SUPPORTED_NODES or not isinstance(children, list):
        raise NotWritten(f"{data['class']} is no container of torch's pytrees")
    return pytree.TreeSpec(kind, context, [_read_spec(child) for child in children])


def _part(part: Part | None) -> Any:
    if part is None:
        return None
    if isinstance(part, Again):
        return {"again": part.number}
    if isinstance(part, Constant):
        if not isinstance(part.value, type):
            raise NotWritten(f"the model returns a {type(part.value).__name__}")
        return {"constant": _name(part.value), "known": part.known}
    assert isinstance(part, Instance)
    if not all(type(key) in _KEYS for key in part.keys):
        raise NotWritten(f"the model returns a {part.cls.__name__} of keys that are no texts")
    return {
        "instance": _name(part.cls), "number": part.number, "base": part.base.__name__,
        "keys": list(part.keys), "attributes": list(part.attributes),
        "content": {"spec": _spec(part.content.spec), "parts": [*map(_part, part.content.parts)]},
    }  # fmt: skip


def _read_part(data: Any) -> Part | None:
    match data:
        case None:
            return None
        case {"again": int(number)}:
            return Again(number)
        case {"constant": str(name), "known": bool(known)}:
            return Constant(_class(name), known)
        case {
            "instance": str(name), "number": int(number), "base": str(base),
            "keys": list(keys), "attributes": list(attributes), "content": content,
        } if base in _BASES and all(isinstance(one, str) for one in attributes):  # fmt: skip
            cls = _class(name)
            if not issubclass(cls, _BASES[base]) or hasattr(cls, "__del__"):
                raise NotWritten(f"objects of {name} are not rebuilt")
            return Instance(
                cls, number, _BASES[base], tuple(keys), tuple(attributes), from_record(content)
            )
    raise NotWritten("not a part of a structure")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return type(value) in _KEYS


def _name(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _class(name) is not cls:
        raise NotWritten(f"the model returns a {cls.__qualname__}, which no module has by name")
    return name


def _class(name: Any) -> type:
    """The class of that name in a module that is loaded."""
    module, _, path = str(name).partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, type):
        raise NotWritten(f"there is no class {name!r} in the loaded modules")
    return found
