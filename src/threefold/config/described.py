"""What the schema says of each key: its default, the values that it takes, and its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from threefold.config.schema import Config
from threefold.config.text import as_yaml


class KeyHelp(NamedTuple):
    """A key without its section's name; its values as words, or as a list of what may be written."""

    key: str
    default: str
    values: tuple[str, ...]
    meaning: str


def keys_in(section: str) -> list[KeyHelp]:
    """The keys of a section, in the order of the schema."""
    return list(_keys(Config.model_fields[section].annotation))


def keys_named(named: str) -> list[tuple[str, KeyHelp]]:
    """(section, key) for each key of a section, or for the one key that is named."""
    section, _, key = named.removeprefix("--").partition(".")
    if section not in Config.model_fields:
        return []
    return [
        (section, each) for each in keys_in(section) if not key or each.key == key or each.key.startswith(f"{key}.")
    ]


def _keys(kind: Any, prefix: str = "") -> Iterator[KeyHelp]:
    for key, entry in kind.model_fields.items():
        if hasattr(entry.annotation, "model_fields"):
            yield from _keys(entry.annotation, f"{key}.")
        else:
            yield KeyHelp(f"{prefix}{key}", as_yaml(entry.default), _values(entry.annotation), entry.description or "")


def _values(annotation: Any) -> tuple[str, ...]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return tuple(f"`{as_yaml(value)}`" for value in inner)
    if origin is Annotated:
        return _values(inner[0])
    if origin in (dict, tuple, list):
        return ("mapping",) if origin is dict else ("list",)
    if inner:
        return tuple(dict.fromkeys(value for part in inner if part is not type(None) for value in _values(part)))
    return ({int: "whole number", float: "number", str: "text", bool: "true, false"}.get(annotation, "mapping"),)
