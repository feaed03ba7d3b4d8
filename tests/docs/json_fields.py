"""The lists of fields in docs/json.md: `python -m tests.docs.tables` writes them from the classes behind the JSON.

A list follows a line `<!-- MODULE.CLASS -->`. Its types are those of the class, its words those of the
docstring's `Attributes:`. A type that the name implies is left out.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from typing import Any

from .items import item

MARK = re.compile(r"^<!-- ([\w.]+) -->\n\n((?:- .*\n(?:  .*\n)*)*)", re.M)
ALIASES = {"Time": "time", "Duration": "duration", "Moment": "duration", "Bytes": "size"}
PLAIN = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object"}
IMPLIED = (("_s", "duration"), ("_bytes", "size"))
SUFFIXES = (("_per_s", "number"), ("seconds", "duration"), *IMPLIED)


def with_fields(text: str) -> str:
    """The page with each list as its class has it."""
    return MARK.sub(lambda found: f"<!-- {found[1]} -->\n\n{fields_of(class_of(found[1]))}", text)


def class_of(name: str) -> type:
    """The class of this name below gemini_hpc."""
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(f"gemini_hpc.{module}"), last)
    assert isinstance(found, type)
    return found


def fields_of(cls: type) -> str:
    """A list of a class's fields."""
    hints, words = typing.get_type_hints(cls), words_of(cls)
    assert list(words) == list(hints), f"{cls.__name__}: the docstring has {list(words)}, the class {list(hints)}"
    kinds = {name: kind_of(cls, name, hint) for name, hint in hints.items()}
    return "".join(item(f"`{name}`{shown(name, kind)}: {words[name]}") for name, kind in kinds.items())


def shown(name: str, kind: str) -> str:
    """The type in parentheses, or nothing where the name implies it."""
    implied = next((kind for end, kind in IMPLIED if name.endswith(end)), "number")
    return "" if kind == implied else f" ({kind})"


def words_of(cls: type) -> dict[str, str]:
    """Return the docstring's text on each attribute."""
    block = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].split("\n\n")[0]
    found = re.findall(r"^    (\w+): ((?:.+\n?)(?:     +.+\n?)*)", block, re.M)
    return {name: text[:1].lower() + " ".join(text[1:].split()) for name, text in found}


def kind_of(cls: type, name: str, hint: Any) -> str:
    """The type of a field in JSON."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [one for one in typing.get_args(hint) if one is not type(None)]
        return f"{kind_of(cls, name, inner[0])}?"
    if typing.get_origin(hint) is tuple:
        inside = typing.get_args(hint)
        if keys := typing.get_type_hints(inside[0]):
            return f"`[{{{', '.join(keys)}}}]`"
        number = "list of" if inside[1] is ... else str(len(inside))
        return f"{number} {kind_of(cls, name, inside[0])}s"
    alias = str(inspect.get_annotations(cls).get(name)).partition(" ")[0]
    plain = PLAIN[typing.get_origin(hint) or hint]
    return ALIASES.get(alias) or next(
        (kind for end, kind in SUFFIXES if plain == "number" and name.endswith(end)), plain
    )
