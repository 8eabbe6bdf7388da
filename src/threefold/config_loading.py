"""Strict loading of the config.

In: a YAML file, `--section.key value` overrides and the environment's mesh defaults. Out: a `Config` that was validated
as a whole, and the origin of each value. Unknown keys are refused with the nearest name; all errors are raised at once.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from threefold.config import Config, DataConfig, MixtureSource
from threefold.errors import ConfigError, Problem

MESH_VARIABLES = {"DP_SIZE": "mesh.dp", "CP_SIZE": "mesh.cp", "TP_SIZE": "mesh.tp"}


@dataclass(frozen=True)
class Loaded:
    """A validated config, and for each `section.key` that is no default where its value came from."""

    config: Config
    origins: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> Iterator[tuple[str, Any, str]]:
        """(section.key, value, origin) of every key, in the order of the schema."""
        for section in Config.model_fields:
            for key, value in getattr(self.config, section):
                yield f"{section}.{key}", value, self.origins.get(f"{section}.{key}", "default")


def load(path: str | None = None, overrides: Sequence[tuple[str, str]] = (), *, environ: Mapping[str, str]) -> Loaded:
    """Reads a YAML file, then the environment's mesh defaults, then `section.key` overrides, each over the one before.

    The environment gives defaults only: what a file or an override sets, stays.

    Args:
        path: YAML 1.2 file of sections, or None.
        overrides: (section.key, value as YAML 1.2 text).
        environ: read for DP_SIZE, CP_SIZE and TP_SIZE.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    problems: list[Problem] = []
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}

    def put(key: str, value: Any, origin: str) -> None:
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
        origins[key] = origin

    def put_text(key: str, text: str, name: str, origin: str) -> None:
        before = len(problems)
        value = _parse(text, name, problems)
        if len(problems) == before:
            put(key, value, origin)

    for variable, key in MESH_VARIABLES.items():
        if (text := environ.get(variable)) is not None:
            put_text(key, text, variable, f"environment {variable}")
    if path is not None:
        for key, value in _read_file(path, problems):
            put(key, value, path)
    for key, text in overrides:
        put_text(key, text, f"--{key}", "command line")
    problems += _unknown(values)
    if not problems:
        return Loaded(validate(values, origins), origins)
    known = {
        section: {key: value for key, value in values[section].items() if key in _keys(section)}
        for section in values.keys() & Config.model_fields.keys()
    }
    try:
        validate(known, origins)
    except ConfigError as error:
        problems += error.problems
    raise ConfigError.of(problems)


def validate(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Config:
    """A Config of nested plain values.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = _unknown(values) + [
            _problem(entry, origins or {})
            for entry in error.errors()
            if entry["type"] != "extra_forbidden" or len(entry["loc"]) > 2
        ]
        raise ConfigError.of(_once(problems)) from None
    if problems := _contradictions(config):
        raise ConfigError.of(problems)
    return config


def _once(problems: Iterable[Problem]) -> list[Problem]:
    # A value of several possible types is refused once for each type.
    return list({problem.what: problem for problem in problems}.values())


def _contradictions(config: Config) -> list[Problem]:
    found = _mixture_contradictions(config)
    if config.model.name_or_path is not None and config.model.config is not None:
        found.append(
            Problem(
                "model.name_or_path and model.config are both set",
                "one of them: trained weights by name, or random ones by sizes",
                "leave one of them out",
            )
        )
    if config.train.steps is not None and config.train.epochs is not None:
        found.append(
            Problem(
                f"train.steps = {config.train.steps} and train.epochs = {config.train.epochs} are both set",
                "one measure of how long to train",
                "leave one of them out",
            )
        )
    if config.eval.source is None and config.eval.every:
        found.append(
            Problem(
                f"eval.every = {config.eval.every} has no effect without eval.source",
                "held-out data to evaluate on",
                "--eval.source FILE_OR_FOLDER, or leave eval.every out",
            )
        )
    found += _skip_problems(config.data.skip)
    for number, beta in enumerate(config.optimizer.betas):
        if not 0 <= beta < 1:
            found.append(
                Problem(
                    f"optimizer.betas[{number}] = {beta} is not a decay",
                    "0 <= beta < 1",
                    "--optimizer.betas '[0.9, 0.95]'",
                )
            )
    if config.optimizer.min_lr > config.optimizer.lr:
        found.append(
            Problem(
                f"optimizer.min_lr = {config.optimizer.min_lr} is above optimizer.lr = {config.optimizer.lr}",
                "a schedule that falls from lr to min_lr",
                f"--optimizer.min_lr 0   (or raise optimizer.lr above {config.optimizer.min_lr})",
            )
        )
    return found


def _skip_problems(skip: Sequence[tuple[int, int]]) -> list[Problem]:
    found = [
        Problem(
            f"data.skip has [{first}, {last}], which ends before it begins",
            "[first, last], both steps included",
            f"--data.skip '[[{last}, {first}]]'",
        )
        for first, last in skip
        if last < first
    ]
    firsts = [first for first, _ in skip]
    if any(later <= earlier for earlier, later in itertools.pairwise(firsts)):
        ascending = sorted({first: [first, last] for first, last in skip}.values())
        found.append(
            Problem(
                f"data.skip has ranges that begin with steps {', '.join(map(str, firsts))}: they do not ascend",
                "the ranges in the order in which the run comes to them, each beginning with another step",
                f"--data.skip '{ascending}'",
            )
        )
    return found


def _mixture_contradictions(config: Config) -> list[Problem]:
    source, mixture = config.data.source, config.data.mixture
    found: list[Problem] = []
    if mixture is None:
        return found
    if not mixture:
        found.append(Problem("data.mixture names no source", "at least one", _MIXTURE_FIX))
    if source != DataConfig().source:
        found.append(
            Problem(
                f"data.source = {source} and data.mixture are both set",
                "one of them: a mixture names all of its sources itself, each with a weight",
                f"leave data.source out, or make it one of the mixture: {{source: {as_yaml(source)}, weight: 1}}",
            )
        )
    if config.train.epochs is not None:
        found.append(
            Problem(
                f"train.epochs = {config.train.epochs} with data.mixture",
                "train.steps: a mixture has no end of its own, each of its sources begins again when it is through",
                "--train.steps N, and leave train.epochs out",
            )
        )
    return found


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
        return _read_yaml(text)
    # Besides syntax: a date that does not exist, more digits than an int may have, a mapping inside itself.
    except (YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{origin}, line {mark.line + 1}" if mark is not None and "\n" in text else origin
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        problems.append(
            Problem(
                f"{place}: {reason}",
                "YAML 1.2",
                f"text needs quotes inside the shell's quotes: {_pasted(text.strip())}"
                if "\n" not in text
                else "correct the line",
            )
        )
        return None


def _read_yaml(text: str) -> Any:
    from ruamel.yaml import YAML

    return _plain(YAML(typ="safe", pure=True).load(text))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def _unknown(values: Mapping[str, Any]) -> list[Problem]:
    found = []
    every = [f"{section}.{key}" for section in Config.model_fields for key in _keys(section)]
    for section, keys in values.items():
        in_section = section in Config.model_fields
        names = [f"{section}.{key}" if key else section for key in keys] if isinstance(keys, Mapping) else [section]
        for name in names:
            if name in every or (in_section and not isinstance(keys, Mapping)):
                continue
            known = every if in_section else [*Config.model_fields, *every]
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            ends = [key for key in every if key.rpartition(".")[2] == name.rpartition(".")[2]]
            meant = next(iter(ends or nearest), None)
            expected = (
                f"one of {section}.{{{', '.join(_keys(section))}}}"
                if in_section
                else f"a key of the sections {', '.join(Config.model_fields)}"
            )
            fix = f"did you mean {meant}?" if meant else "`threefold train --print-config` lists every key"
            found.append(Problem(f"unknown key {name}", expected, fix))
    return found


def _keys(section: str) -> list[str]:
    annotation: Any = Config.model_fields[section].annotation
    return list(annotation.model_fields)


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


_MIXTURE_FIX = (
    "--data.mixture '{code: {source: FOLDER, weight: 0.7}, prose: {source: hf:ID, weight: 0.3}}'   (any names)"
)


def _mixture_problem(entry: Any, where: str) -> Problem:
    """What is wrong inside data.mixture, which alone has keys below a key."""
    path = ".".join(map(str, entry["loc"]))
    keys = ", ".join(MixtureSource.model_fields)
    if entry["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(str(entry["loc"][-1]), MixtureSource.model_fields, n=1, cutoff=0.5)
        fix = f"did you mean {nearest[0]}?" if nearest else _MIXTURE_FIX
        return Problem(f"unknown key {path}{where}", f"one of {keys}", fix)
    if entry["type"] == "missing":
        return Problem(f"there is no {path}{where}", "a source and its weight under each name", _MIXTURE_FIX)
    template = _EXPECTED.get(entry["type"]) if len(entry["loc"]) > 3 else "{{name: {{source: ..., weight: ...}}, ...}}"
    expected = template.format(**entry.get("ctx", {})) if template else entry["msg"]
    return Problem(f"{path} = {as_yaml(entry['input'])} is not accepted{where}", expected, _MIXTURE_FIX)


def _problem(entry: Any, origins: Mapping[str, str]) -> Problem:
    path = [str(part) for part in entry["loc"]]
    key = ".".join(path[:2])
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
    elif key == "train.micro_batch":
        expected = "a whole number greater than 0, or auto"
    origin = origins.get(key, "")
    default = Config().model_dump().get(path[0], {}).get(path[1]) if len(path) > 1 else None
    if origin.startswith("environment "):
        fix = f"unset {origin.removeprefix('environment ')}"
    elif entry["type"] == "string_type" and not isinstance(entry["input"], list | Mapping | None):
        fix = f"in quotes it is text: --{key} {_pasted(str(entry['input']))}"
    elif default is not None:
        fix = f"--{key} {_pasted(default)}   (the default)"
    else:
        fix = f"leave {key} out"
    where = f" ({origin})" if origin else ""
    place = "".join(f"[{part}]" for part in entry["loc"][2:] if isinstance(part, int) and entry["type"] != "missing")
    return Problem(f"{key}{place} = {as_yaml(entry['input'])} is not accepted{where}", expected, fix)


def as_yaml(value: Any) -> str:
    """A plain value as YAML text that fits one line and reads back to the same value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if _is_plain_text(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, BaseModel):
        return as_yaml(value.model_dump(exclude_none=True))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_yaml(str(key))}: {as_yaml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    return "null" if value is None else str(value)


def _pasted(value: Any) -> str:
    """As `as_yaml`, quoted for the shell."""
    return shlex.quote(as_yaml(value))


def _is_plain_text(text: str) -> bool:
    from ruamel.yaml.error import YAMLError

    try:
        # Some characters mean something only inside brackets, some only outside of them, some only in a key.
        return _read_yaml(text) == text and _read_yaml(f"{{{text}: [{text}]}}") == {text: [text]}
    except (YAMLError, ValueError, RecursionError):
        return False


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
