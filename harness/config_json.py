"""The configuration of a run to and from JSON, and dotted names of its fields. Free of torch."""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any

import msgspec
import msgspec.inspect

from harness.config import Trainer
from harness.errors import UsageError


def to_dict(config: Trainer.Config) -> dict[str, Any]:
    """The whole tree as JSON-ready builtins."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree


def to_json(config: Trainer.Config) -> str:
    return json.dumps(to_dict(config), indent=2)


def from_dict(tree: dict[str, Any], *, strict: bool = True) -> Trainer.Config:
    """The configuration that `to_dict` gave, or one with fields left out (their defaults).

    `strict=False` also takes numbers and booleans written as strings, as a command line gives them.
    Raises `UsageError` naming the field for an unknown name or a value of the wrong type.
    """
    _reject_unknown(tree, Trainer.Config, "")
    try:
        return msgspec.convert(tree, Trainer.Config, strict=strict)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        place = place.rstrip("`")
        raise UsageError(f"configuration: {place or 'value'}: {reason}{_remedy(place) if place else ''}") from None


def _remedy(place: str) -> str:
    """What a field takes, where the name of its type does not say."""
    kind: Any = Trainer.Config
    for name in place.partition("[")[0].split("."):
        kind = _fields_of(kind)[name]
    kinds = getattr(kind, "types", (kind,))
    words = [word for one in kinds if isinstance(one, msgspec.inspect.LiteralType) for word in one.values]
    if words:
        return f"; it is {'a number, or ' if len(kinds) > 1 else ''}one of {', '.join(map(str, words))}"
    if any(isinstance(one, msgspec.inspect.ListType) for one in kinds):
        return '; a list is written as JSON, such as ["…", "…"]'
    return ""


def from_json(text: str | bytes) -> Trainer.Config:
    """Reads what `to_json` wrote; raises `UsageError`."""
    try:
        tree = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"configuration is not a JSON object: {error}") from None
    return from_dict(tree)


def field_names(cls: Any = Trainer.Config, prefix: str = "") -> list[str]:
    """Every dotted name that can be overridden, in order: `model.dim`, `training.steps`, …"""
    names: list[str] = []
    for name, kind in _fields_of(cls).items():
        names += field_names(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]
    return names


def _fields_of(cls: Any) -> dict[str, Any]:
    """Field name -> the dataclass it holds, or a msgspec type for a plain value."""
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.DataclassType)
    return {f.name: getattr(f.type, "cls", f.type) for f in info.fields}


def _reject_unknown(tree: Any, cls: Any, prefix: str) -> None:
    if not isinstance(tree, dict):
        return
    known = _fields_of(cls)
    for name, value in tree.items():
        if name not in known:
            raise UsageError(
                f"configuration has no field {prefix}{name}; known: {', '.join(prefix + k for k in known)}"
            )
        if dataclasses.is_dataclass(known[name]):
            _reject_unknown(value, known[name], f"{prefix}{name}.")


def with_overrides(config: Trainer.Config, overrides: list[tuple[str, str]]) -> Trainer.Config:
    """A copy with dotted fields replaced by values as a command line gives them (the last of a name wins).

    Raises `UsageError` for a name that does not exist, with the closest ones, or for a value of the wrong type.
    """
    names = field_names()
    tree = to_dict(config)
    for dotted, value in overrides:
        if dotted not in names:
            close = difflib.get_close_matches(dotted, names, n=3, cutoff=0.5) or [
                n for n in names if n.split(".")[-1] == dotted.split(".")[-1]
            ]
            hint = f"; did you mean {' or '.join('--' + c for c in close)}?" if close else " (--print-config lists all)"
            raise UsageError(f"no field --{dotted}{hint}")
        *path, leaf = dotted.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[leaf] = _structured(dotted, value)
    return from_dict(tree, strict=False)


def _structured(name: str, value: str) -> Any:
    """A list is written as JSON on a command line; everything else is as it stands. Raises `UsageError` for bytes that
    are no text, which no JSON could hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"--{name} {value!r} is not UTF-8: give a name without such bytes, or a link to it") from None
    try:
        return json.loads(value) if value.startswith("[") else value
    except (json.JSONDecodeError, RecursionError):  # the latter for lists in lists without end
        return value
