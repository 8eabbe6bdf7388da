"""The schema's description of each key: its default, the values that it takes, and its meaning."""

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from threefold.config.schema import Config, every_key
from threefold.config.yaml_text import as_yaml


class KeyHelp(NamedTuple):
    """A key without its section's name; its values as words, or as a list of what may be written."""

    key: str
    default: str
    values: tuple[str, ...]
    meaning: str


def keys_in(section: str) -> list[KeyHelp]:
    """The keys of a section, in the order of the schema."""
    return list(_keys(Config.model_fields[section].annotation))


def every_key_described() -> Iterator[tuple[str, KeyHelp]]:
    """(section.key, its description in the schema), in the order of the schema."""
    for section in Config.model_fields:
        yield from ((f"{section}.{each.key}", each) for each in keys_in(section))


def keys_about(words: str) -> dict[str, KeyHelp]:
    """The keys of a section, or the key that is named; else those in whose name, values or meaning all words occur."""
    every = dict(every_key_described())
    named = words.removeprefix("--")
    if below := {
        key: about for key, about in every.items() if f"{key}.".startswith(f"{named}.")
    }:
        return below
    wanted = words.lower().split()
    return {
        key: about
        for key, about in every.items()
        if all(word in f"{key} {about}".lower() for word in wanted)
    }


def nearest_name(words: str) -> str:
    """The section, the key or the last part of a key that is spelled most like the words."""
    names = {part for key in every_key() for part in (key, *key.split("."))}
    return difflib.get_close_matches(words.removeprefix("--"), sorted(names), n=1, cutoff=0)[0]


def _keys(kind: Any, prefix: str = "") -> Iterator[KeyHelp]:
    for key, entry in kind.model_fields.items():
        if hasattr(entry.annotation, "model_fields"):
            yield from _keys(entry.annotation, f"{key}.")
        else:
            yield KeyHelp(
                f"{prefix}{key}",
                as_yaml(entry.default),
                _values(entry.annotation),
                entry.description or "",
            )


def _values(annotation: Any) -> tuple[str, ...]:
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Literal:
        return tuple(f"`{as_yaml(value)}`" for value in inner)
    if origin is Annotated:
        return _values(inner[0])
    if origin in (dict, tuple, list):
        return ("mapping",) if origin is dict else ("list",)
    if inner:
        return tuple(
            dict.fromkeys(
                value for part in inner if part is not type(None) for value in _values(part)
            )
        )
    return (
        {int: "whole number", float: "number", str: "text", bool: "true, false"}.get(
            annotation, "mapping"
        ),
    )
