"""The keys of the config, and what is said of keys that do not exist and of values that are not accepted."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from threefold.config.rules import MIXTURE_FIX
from threefold.config.schema import Config, MixtureSource
from threefold.config.text import as_yaml, pasted
from threefold.errors import Problem


def every_key() -> list[str]:
    """Every `section.key`, and `section.key.key` where a section has one inside, in the order of the schema."""
    return [f"{section}.{key}" for section in Config.model_fields for key in keys_of(section)]


def value_at(config: Config, key: str) -> Any:
    """The value under a key of `every_key`."""
    return functools.reduce(getattr, key.split("."), config)


def unknown(values: Mapping[str, Any]) -> list[Problem]:
    """A problem for each key that the schema does not have, with the nearest one."""
    found = []
    every = every_key()
    for section, keys in values.items():
        in_section = section in Config.model_fields
        names = _names(section, keys) if isinstance(keys, Mapping) else [section]
        for name in names:
            if name in every or (in_section and not isinstance(keys, Mapping)):
                continue
            known = every if in_section else [*Config.model_fields, *every]
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            ends = [key for key in every if key.rpartition(".")[2] == name.rpartition(".")[2]]
            meant = next(iter(ends or nearest), None)
            expected = (
                f"one of {section}.{{{', '.join(keys_of(section))}}}"
                if in_section
                else f"a key of the sections {', '.join(Config.model_fields)}"
            )
            fix = f"did you mean {meant}?" if meant else "`threefold train --print-config` lists every key"
            found.append(Problem(f"unknown key {name}", expected, fix))
    return found


def _names(section: str, keys: Mapping[str, Any]) -> Iterator[str]:
    inner = inner_sections(section)
    for key, value in keys.items():
        if key in inner and isinstance(value, Mapping):
            yield from (f"{section}.{key}.{each}" for each in value)
        elif key not in inner:
            yield f"{section}.{key}" if key else section


def keys_of(section: str) -> Iterator[str]:
    """The keys of a section, without its name."""
    annotation: Any = Config.model_fields[section].annotation
    inner = inner_sections(section)
    for key in annotation.model_fields:
        yield from (f"{key}.{each}" for each in inner[key].model_fields) if key in inner else (key,)


def inner_sections(section: str) -> dict[str, Any]:
    """The keys of a section that are sections themselves, and their schemas."""
    field = Config.model_fields.get(section)
    fields: Mapping[str, Any] = getattr(field.annotation, "model_fields", {}) if field is not None else {}
    kinds = {key: entry.annotation for key, entry in fields.items()}
    return {key: kind for key, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


_EXPECTED = {
    "greater_than": "a number greater than {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "literal_error": "one of {expected}",
    "missing": "another entry",
    "model_type": "keys below the section's name",
    "dict_type": "a mapping: {{key: value}}",
}


def _mixture_problem(entry: Any, where: str) -> Problem:
    """What is wrong inside data.mixture, which alone has keys below a key."""
    path = ".".join(map(str, entry["loc"]))
    keys = ", ".join(MixtureSource.model_fields)
    if entry["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(str(entry["loc"][-1]), MixtureSource.model_fields, n=1, cutoff=0.5)
        fix = f"did you mean {nearest[0]}?" if nearest else MIXTURE_FIX
        return Problem(f"unknown key {path}{where}", f"one of {keys}", fix)
    if entry["type"] == "missing":
        return Problem(f"there is no {path}{where}", "a source and its weight under each name", MIXTURE_FIX)
    template = _EXPECTED.get(entry["type"]) if len(entry["loc"]) > 3 else "{{name: {{source: ..., weight: ...}}, ...}}"
    expected = template.format(**entry.get("ctx", {})) if template else entry["msg"]
    return Problem(f"{path} = {as_yaml(entry['input'])} is not accepted{where}", expected, MIXTURE_FIX)


def problem_of(entry: Any, origins: Mapping[str, str]) -> Problem:
    """What one of pydantic's errors means to the user."""
    path = [str(part) for part in entry["loc"]]
    inside = len(path) > 2 and path[1] in inner_sections(path[0])
    key = ".".join(path[: 3 if inside else 2])
    if key == "data.mixture":
        return _mixture_problem(entry, f" ({origins[key]})" if key in origins else "")
    template = _EXPECTED.get(entry["type"])
    expected = template.format(**entry.get("ctx", {})) if template else entry["msg"]
    if key in ("mesh.dp", "mesh.dp_shard", "mesh.cp", "mesh.tp"):
        expected = "a whole number greater than 0, or auto"
    elif key == "optimizer.betas":
        expected = "two numbers, both at least 0 and below 1"
    elif key == "data.skip":
        expected = "[first, last] ranges of steps, counted from 1: [[1000, 1100]]"
    elif key == "log.trackers":
        expected = "a list of names: [tensorboard, wandb]"
    elif key == "train.micro_batch":
        expected = "a whole number greater than 0, or auto"
    origin = origins.get(key, "")
    default = value_at(Config(), key) if key in every_key() else None
    if origin.startswith("environment "):
        fix = f"unset {origin.removeprefix('environment ')}"
    elif entry["type"] == "string_type" and not isinstance(entry["input"], list | Mapping | None):
        fix = f"in quotes it is text: --{key} {pasted(str(entry['input']))}"
    elif default is not None:
        fix = f"--{key} {pasted(default)}   (the default)"
    else:
        fix = f"leave {key} out"
    where = f" ({origin})" if origin else ""
    place = "".join(
        f"[{part}]"
        for part in entry["loc"][len(key.split(".")) :]
        if isinstance(part, int) and entry["type"] != "missing"
    )
    return Problem(f"{key}{place} = {as_yaml(entry['input'])} is not accepted{where}", expected, fix)
