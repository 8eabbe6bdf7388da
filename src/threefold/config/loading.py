"""Strict loading of the config.

In: a YAML file, `--section.key value` overrides and the environment's mesh defaults. Out: a `Config` that was validated
as a whole, and the origin of each value. Unknown keys are refused with the nearest name; all errors are raised at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from threefold.config.problems import every_key, inner_sections, keys_of, problem_of, unknown, value_at
from threefold.config.rules import contradictions
from threefold.config.schema import Config
from threefold.config.text import pasted, read_yaml
from threefold.errors import ConfigError, Problem

MESH_VARIABLES = {"DP_SIZE": "mesh.dp", "CP_SIZE": "mesh.cp", "TP_SIZE": "mesh.tp"}


@dataclass(frozen=True)
class Loaded:
    """A validated config, and for each `section.key` that is no default where its value came from."""

    config: Config
    origins: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> Iterator[tuple[str, Any, str]]:
        """(section.key, value, origin) of every key, in the order of the schema."""
        for key in every_key():
            yield key, value_at(self.config, key), self.origins.get(key, "default")


def load(
    path: str | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    environ: Mapping[str, str],
    defaults: Iterable[tuple[str, str, str]] = (),
    settings: Iterable[tuple[str, str, str]] = (),
) -> Loaded:
    """Reads a YAML file, then the environment's mesh defaults, then `section.key` overrides, each over the one before.

    The environment gives defaults only: what a file or an override sets, stays.

    Args:
        path: YAML 1.2 file of sections, or None.
        overrides: (section.key, value as YAML 1.2 text).
        environ: read for DP_SIZE, CP_SIZE and TP_SIZE.
        defaults: (section.key, value as text, origin) that a launcher suggests; the file overrules them.
        settings: the same, of a job's owner; they overrule the file, and overrides overrule them.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    problems: list[Problem] = []
    values: dict[str, dict[str, Any]] = {}  # and one level deeper where a section has one inside
    origins: dict[str, str] = {}

    def put(key: str, value: Any, origin: str) -> None:
        section, _, name = key.partition(".")
        inner, _, rest = name.partition(".")
        if inner not in inner_sections(section):
            values.setdefault(section, {})[name] = value
        elif not rest and isinstance(value, Mapping):
            for each, own in value.items():
                put(f"{key}.{each}", own, origin)
            return
        elif not rest:
            values.setdefault(section, {})[inner] = value
        else:
            values.setdefault(section, {}).setdefault(inner, {})[rest] = value
        origins[key] = origin

    def put_text(key: str, text: str, name: str, origin: str) -> None:
        before = len(problems)
        value = _parse(text, name, problems)
        if len(problems) == before:
            put(key, value, origin)

    for key, value, origin in defaults:
        put_text(key, value, origin, origin)
    for variable, key in MESH_VARIABLES.items():
        if (text := environ.get(variable)) is not None:
            put_text(key, text, variable, f"environment {variable}")
    if path is not None:
        for key, value in _read_file(path, problems):
            put(key, value, path)
    for key, value, origin in settings:
        put_text(key, value, origin, origin)
    for key, text in overrides:
        put_text(key, text, f"--{key}", "command line")
    problems += unknown(values)
    if not problems:
        return Loaded(validate(values, origins), origins)
    try:
        validate(_known(values), origins)
    except ConfigError as error:
        problems += error.problems
    raise ConfigError.of(problems)


def _known(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of keys that exist."""
    found: dict[str, Any] = {}
    for section in values.keys() & Config.model_fields.keys():
        inner, keys = inner_sections(section), set(keys_of(section))
        found[section] = {
            key: {each: own for each, own in value.items() if f"{key}.{each}" in keys}
            if key in inner and isinstance(value, Mapping)
            else value
            for key, value in values[section].items()
            if key in keys or key in inner
        }
    return found


def validate(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Config:
    """A Config of nested plain values.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = unknown(values) + [
            problem_of(entry, origins or {})
            for entry in error.errors()
            if entry["type"] != "extra_forbidden" or entry["loc"][:2] == ("data", "mixture")
        ]
        raise ConfigError.of(_once(problems)) from None
    if problems := contradictions(config):
        raise ConfigError.of(problems)
    return config


def _once(problems: Iterable[Problem]) -> list[Problem]:
    # A value of several possible types is refused once for each type.
    return list({problem.what: problem for problem in problems}.values())


def _read_file(path: str, problems: list[Problem]) -> list[tuple[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        problems.append(Problem(f"{path}: {reason}", "a YAML file that can be read", "check the path"))
        return []
    content = _parse(text, path, problems)
    if content is None:
        return []
    if not isinstance(content, Mapping):
        problems.append(
            Problem(
                f"{path} is no mapping of sections",
                "sections with keys: `train:` and below it `  steps: 100`",
                f"sections are {', '.join(Config.model_fields)}",
            )
        )
        return []
    pairs: list[tuple[str, Any]] = []
    for section, keys in content.items():
        if not keys and keys is not False and section not in Config.model_fields:
            pairs.append((section, None))
        elif isinstance(keys, Mapping):
            pairs += [(f"{section}.{key}", value) for key, value in keys.items()]
        elif keys is not None:
            problems.append(
                Problem(
                    f"{path}: {section} = {keys!r} is no section",
                    "keys below the section's name",
                    f"sections are {', '.join(Config.model_fields)}",
                )
            )
    return pairs


def _parse(text: str, origin: str, problems: list[Problem]) -> Any:
    from ruamel.yaml.error import YAMLError

    try:
        return read_yaml(text)
    # Besides syntax: a date that does not exist, more digits than an int may have, a mapping inside itself.
    except (YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{origin}, line {mark.line + 1}" if mark is not None and "\n" in text else origin
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        problems.append(
            Problem(
                f"{place}: {reason}",
                "YAML 1.2",
                f"text needs quotes inside the shell's quotes: {pasted(text.strip())}"
                if "\n" not in text
                else "correct the line",
            )
        )
        return None


def dump(config: Config) -> str:
    """The config as YAML text that `load` reads back."""
    import io

    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    buffer = io.StringIO()
    yaml.dump(config.model_dump(mode="json"), buffer)
    return buffer.getvalue()
