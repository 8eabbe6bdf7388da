"""Strict loading of the config.

In: a YAML file, `--section.key value` overrides and the environment's mesh defaults. Out: a `Config` that was validated
as a whole, and the origin of each value. Unknown keys are refused with the nearest name; all errors are reported at
once.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from threefold.config.dropped import DROPPED, ELSEWHERE
from threefold.config.meant_values import meant_path, meant_value
from threefold.config.optimizer import GroupConfig
from threefold.config.optimizer_rules import GROUPS_FIX
from threefold.config.paths import RUN_CONFIG, is_of_program, is_run, literal_paths, run_of
from threefold.config.rules import MIXTURE_FIX, contradictions
from threefold.config.schema import (
    Config,
    MixtureSource,
    every_key,
    inner_sections,
    keys_of,
    value_at,
)
from threefold.config.yaml_text import as_yaml, parse, pasted, to_set
from threefold.errors import ConfigError, Problem, shell_word
from threefold.jsonl import Values

MESH_VARIABLES = {"DP_SIZE": "mesh.dp", "CP_SIZE": "mesh.cp", "TP_SIZE": "mesh.tp"}


@dataclass(frozen=True)
class LoadedConfig:
    """A validated config, the origin of each `section.key` that is not a default, and the command's additions.

    Attributes:
        accept_changes: a resumed run may continue although keys that affect training have changed.
        quiet: only errors are printed.
        user_objects: objects of a program that calls `threefold.train` (`run.user_objects.UserObjects`), or None.
        reason: a file that takes the error that ends a rank, for the program that started it.
        last: the process ends with the run, as for commands and ranks.
        pulses: files for the ranks' pulses, kept by the process that starts them (`run.watch.pulse.Witness`).
    """

    config: Config
    origins: Mapping[str, str] = field(default_factory=dict)
    accept_changes: bool = False
    quiet: bool = False
    user_objects: Any = None
    reason: str | None = None
    last: bool = False
    pulses: tuple[str, ...] = ()


def load(
    path: str | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    environ: Mapping[str, str],
    defaults: Iterable[tuple[str, str, str]] = (),
    settings: Iterable[tuple[str, str, str]] = (),
) -> LoadedConfig:
    """Reads a YAML file, then the environment's mesh defaults, then `section.key` overrides; later ones win.

    The environment gives only defaults: a file or an override takes precedence over it.

    Args:
        path: YAML 1.2 file of sections, or None. The config of a run's folder means that run: `log.dir` is its folder.
        overrides: (section.key, value as YAML 1.2 text).
        environ: read for DP_SIZE, CP_SIZE and TP_SIZE.
        defaults: (section.key, value as text, origin) that a launcher suggests; the file overrides them.
        settings: the same, from a job's owner; they override the file, and `overrides` override them.

    Raises:
        ConfigError: every problem, at once.
    """
    problems: list[Problem] = []
    values: dict[str, dict[str, Any]] = {}  # one level deeper for a section inside a section
    origins: dict[str, str] = {}
    sizes = {name: key for name, key in MESH_VARIABLES.items() if name in environ}
    before = [(key, text, origin, origin) for key, text, origin in defaults]
    before += [(key, environ[name], name, f"environment {name}") for name, key in sizes.items()]
    after = [(key, text, origin, origin) for key, text, origin in settings]
    after += [(key, text, f"--{key}", "command line") for key, text in overrides]
    layers = _parsed(before, problems)
    if path is not None:
        layers += [(key, value, path) for key, value in _read_file(path, problems)]
        if (run := run_of(Path(path))) is not None:
            layers.append(("log.dir", str(run), path))
    for key, value, origin in layers + _parsed(after, problems):
        _put(values, origins, key, value, origin)
    problems += _unknown(values)
    if not problems:
        return LoadedConfig(validate(values, origins), origins)
    try:
        validate(_existing_keys(values), origins)
    except ConfigError as error:
        problems += error.problems
    raise ConfigError.of(problems)


def _parsed(
    texts: Iterable[tuple[str, str, str, str]], problems: list[Problem]
) -> list[tuple[str, Any, str]]:
    """(section.key, value, origin) of (section.key, text, name in an error, origin); not YAML: a problem."""
    entries = []
    for key, text, name, origin in texts:
        if not text.strip() and origin == "command line":
            # As null it would train another model, or another number of steps, than the command means.
            open_key = key in every_key() and value_at(Config(), key) is None
            problems.append(
                Problem(
                    f"{name} is empty",
                    "a value (an empty or unset variable has none), or an explicit null",
                    f"--{key} null" if open_key else f"leave --{key} out",
                )
            )
            continue
        try:
            value = parse(text, name)
        except ConfigError as error:
            problems += error.problems
            continue
        if (
            isinstance(value, str)
            and value != text
            and text.lstrip()[0] not in _MARKED
            and origin == "command line"
        ):
            # It would name another folder: YAML folds line breaks, and drops blanks at the ends and ` #` with what
            # follows.
            expected = "text that YAML leaves unchanged, or quoted text"
            problems.append(
                Problem(
                    f"{name} = {text!r} is read as {value!r}",
                    expected,
                    f"--{key} {pasted(text)}",
                )
            )
            continue
        entries.append((key, value, origin))
    return entries


def _put(
    values: dict[str, dict[str, Any]],
    origins: dict[str, str],
    key: str,
    value: Any,
    origin: str,
) -> None:
    section, _, name = key.partition(".")
    inner, _, rest = name.partition(".")
    if inner not in inner_sections(section):
        values.setdefault(section, {})[name] = value
    elif rest:
        own = values.setdefault(section, {})
        before = own.get(inner)
        own[inner] = {**(before if isinstance(before, Mapping) else {}), rest: value}
    elif isinstance(value, Mapping):
        for each, own in value.items():
            _put(values, origins, f"{key}.{each}", own, origin)
        return
    else:
        values.setdefault(section, {})[inner] = value
    origins[key] = origin


def _existing_keys(values: Mapping[str, Values]) -> Values:
    """The values of keys that exist."""
    sections: dict[str, Any] = {}
    for section in values.keys() & Config.model_fields.keys():
        inner = inner_sections(section)
        keys = set(keys_of(section))
        sections[section] = {
            key: {each: own for each, own in value.items() if f"{key}.{each}" in keys}
            if key in inner and isinstance(value, Mapping)
            else value
            for key, value in values[section].items()
            if key in keys or key in inner
        }
    return sections


def validate(values: Values, origins: Mapping[str, str] | None = None) -> Config:
    """A Config of nested plain values; ConfigError with every problem at once."""
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = _unknown(values) + [
            _problem_of(entry, origins or {}, values)
            for entry in error.errors()
            if entry["type"] != "extra_forbidden"
            or ".".join(map(str, entry["loc"][:2])) in _WITH_KEYS_BELOW
            if entry["type"] != "too_short"
            or not entry["input"]  # else its entries were refused already
        ]
        raise ConfigError.of(_by_value(problems)) from None
    ConfigError.raise_for([*contradictions(config), *literal_paths(config)])
    return config


def _by_value(problems: Iterable[Problem]) -> Iterable[Problem]:
    """One problem per value: pydantic refuses one that may have several types once for each."""
    merged = dict[str, Problem]()
    for problem in problems:
        if (before := merged.get(problem.what)) and before.expected != problem.expected:
            problem = replace(problem, expected=f"{before.expected}, or {problem.expected}")
        merged[problem.what] = problem
    return merged.values()


def _read_file(path: str, problems: list[Problem]) -> list[tuple[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        if Path(path).name == RUN_CONFIG and is_run(run := Path(path).parent):
            what = f"the run {run} has no {RUN_CONFIG} that can be read"
            expected, fix = (
                "the config with which it was started",
                f"restore {shell_word(path)} from a copy",
            )
            if is_of_program(run):
                what = f"{run} is the run of a program with a custom loop (threefold.Run), which has no {RUN_CONFIG}"
                expected = "a run of threefold train: only the program knows what this one reads and computes"
                fix = "run the program again to resume it"
            fix += f"; its weights: threefold export {shell_word(run)} --to DIR"
            problems.append(Problem(what, expected, fix))
            return []
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        way = "check the path" if isinstance(error, OSError) else "save it as UTF-8"
        fix = meant_path(path) or way
        problems.append(Problem(f"{path}: {reason}", "a readable YAML file", fix))
        return []
    try:
        content = parse(text, path)
    except ConfigError as error:
        problems += [replace(each, fix=meant_path(path) or each.fix) for each in error.problems]
        return []
    if content is None:
        return []
    fix = f"the sections are {', '.join(Config.model_fields)}"
    if not isinstance(content, Mapping):
        expected = "sections with keys: `train:` and below it `  steps: 100`"
        fix = meant_path(path) or fix
        problems.append(Problem(f"{path} must contain sections such as train:", expected, fix))
        return []
    pairs: list[tuple[str, Any]] = []
    for section, keys in content.items():
        name, _, below = str(section).partition(".")
        if isinstance(keys, Mapping) and keys:
            pairs += [(f"{section}.{key}", value) for key, value in keys.items()]
        elif section not in Config.model_fields and not below:
            pairs.append((name, None))
        elif keys is not None and not isinstance(keys, Mapping):
            what = f"{path}: {section} = {keys!r} is not a section"
            own = f"{name}: {{{below}: {as_yaml(keys)}}}" if below else fix
            problems.append(Problem(what, _KEYS_BELOW, own))
    return pairs


def _unknown(values: Values) -> list[Problem]:
    """A problem for each key that the schema does not have, with the nearest one."""
    problems = []
    every = every_key()
    for section, keys in values.items():
        in_section = section in Config.model_fields
        for name in _names(section, keys) if isinstance(keys, Mapping) else [section]:
            if in_section and (name in every or not isinstance(keys, Mapping)):
                continue
            valid = every if in_section else [*Config.model_fields, *every]
            nearest = difflib.get_close_matches(name, valid, n=1)
            leaf = name.rpartition(".")[2]
            ends = [key for key in every if key.rpartition(".")[2] == leaf]
            meant = ELSEWHERE.get(leaf) or next(iter(ends or nearest), None)
            expected = f"a key of the sections {', '.join(Config.model_fields)}"
            if in_section:
                expected = f"one of {section}.{{{', '.join(keys_of(section))}}}"
            fix = (
                f"did you mean {meant}?"
                if meant
                else "`threefold train --print-config` lists every key"
            )
            if name in every:
                fix = f"{name.replace('.', ': {')}: ...{'}' * name.count('.')}"
            fix = DROPPED.get(name, fix)
            problems.append(Problem(f"unknown key {name}", expected, fix))
    return problems


def _names(section: str, keys: Values) -> Iterator[str]:
    inner = inner_sections(section)
    for key, value in keys.items():
        if key in inner and isinstance(value, Mapping):
            yield from (f"{section}.{key}.{each}" for each in value)
        elif key not in inner:
            yield f"{section}.{key}" if key else section


# Beginnings of texts that determine how they are parsed: quotes, blocks, tags.
_MARKED = "\"'|>&!*"
# Keys whose values have their own keys, which are checked with the value.
_WITH_KEYS_BELOW: Values = {
    "data.mixture": (
        MixtureSource,
        "a source and its weight under each name",
        "{name: {source: ..., weight: ...}, ...}",
        MIXTURE_FIX,
        Problem("", "", MIXTURE_FIX),
    ),
    "optimizer.groups": (
        GroupConfig,
        "a regular expression for the parameters' names",
        "[{match: REGEX, lr: ..., weight_decay: ...}, ...]",
        "match, lr, weight_decay and name are its keys",
        to_set("", "", *GROUPS_FIX),
    ),
}
_KEYS_BELOW = "keys below the section's name"
_EXPECTED = {
    "greater_than": "a number greater than {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "literal_error": "one of {expected}",
    "tuple_type": "a list",
    "list_type": "a list",
    "missing": "another entry",
    "too_short": "at least {min_length} entry",
    "model_type": _KEYS_BELOW,
    "dict_type": "a mapping: {{key: value}}",
}
_AXIS_SIZE = "a whole number greater than 0, or auto"
_EXPECTED_OF_KEY = {
    "optimizer.lr": "a number greater than 0, or auto",
    **dict.fromkeys(
        ("mesh.dp", "mesh.dp_shard", "mesh.cp", "mesh.tp", "train.micro_batch"), _AXIS_SIZE
    ),
    "optimizer.betas": "two numbers, both at least 0 and below 1",
    "data.skip": "[first, last] ranges of steps, counted from 1: [[1000, 1100]]",
    "log.profile": "[first, last] steps, counted from 1: [10, 12]",
    "log.trackers": "a list of names: [tensorboard, wandb]",
}


def _problem_of(entry: Any, origins: Mapping[str, str], values: Values) -> Problem:
    """One of pydantic's errors in the user's terms."""
    path = [str(part) for part in entry["loc"]]
    inside = len(path) > 2 and path[1] in inner_sections(path[0])
    key = ".".join(path[: 3 if inside else 2])
    where = f" ({origins[key]})" if key in origins else ""
    if key in _WITH_KEYS_BELOW:
        return _entry_problem(entry, key, where)
    rest = entry["loc"][len(key.split(".")) :] if entry["type"] != "missing" else ()
    place = "".join(f"[{part}]" for part in rest if isinstance(part, int))
    what = f"{key}{place} = {as_yaml(entry['input'])} is not accepted{where}"
    expected = _EXPECTED_OF_KEY.get(key) or _expected(entry)
    if entry["type"] == "string_type" and not isinstance(entry["input"], list | Mapping | None):
        whole = values
        for part in key.split("."):
            whole = whole[part]
        return to_set(what, expected, key, _as_text(whole), remark="   (quotes make it text)")
    return _refused(what, expected, entry, key, origins.get(key, ""))


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_as_text, value)]
    if isinstance(value, Mapping):
        return {name: _as_text(each) for name, each in value.items()}
    return value if value is None else str(value)


def _expected(entry: Any) -> str:
    template = _EXPECTED.get(entry["type"])
    if entry["type"] == "literal_error" and " or " not in entry["ctx"]["expected"]:
        return str(entry["ctx"]["expected"]).strip("'")
    return template.format(**entry.get("ctx", {})) if template else entry["msg"]


def _refused(what: str, expected: str, entry: Any, key: str, origin: str) -> Problem:
    default = value_at(Config(), key) if key in every_key() else None
    if origin.startswith("environment "):
        return Problem(what, expected, f"unset {origin.removeprefix('environment ')}")
    if (
        key in every_key()
        and len(entry["loc"]) <= len(key.split(".")) + 1
        and not isinstance(entry["input"], Mapping)
    ):
        meant = meant_value(key, entry["input"])
        if meant is not None:
            value, remark = meant
            return to_set(what, expected, key, value, remark=f"   ({remark})" if remark else "")
    if default is None:
        adapters = key == "model.lora" and entry["input"]
        fix = "--model.lora.r 16" if adapters else f"leave {key} out"
        return Problem(what, expected, fix)
    return to_set(what, expected, key, default, remark="   (the default)")


def _entry_problem(entry: Any, key: str, where: str) -> Problem:
    """A problem inside data.mixture or optimizer.groups."""
    kind, required, whole, unknown, problem = _WITH_KEYS_BELOW[key]
    # Pydantic names the alternatives of a source too.
    parts = (part for part in entry["loc"][2:] if part not in ("one source", "sources"))
    path = key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    if entry["type"] == "extra_forbidden":
        keys, leaf = [*kind.model_fields], str(entry["loc"][-1])
        nearest = difflib.get_close_matches(leaf, keys, n=1, cutoff=0.5)
        fix = f"did you mean {nearest[0]}?" if nearest else unknown
        return Problem(
            f"unknown key {path}{where}",
            f"one of {', '.join(keys)}",
            DROPPED.get(f"{key}.{leaf}", fix),
        )
    if entry["type"] == "missing":
        return replace(problem, what=f"there is no {path}{where}", expected=required)
    expected = _expected(entry) if len(entry["loc"]) > 3 else whole
    what = f"{path} = {as_yaml(entry['input'])} is not accepted{where}"
    return replace(problem, what=what, expected=expected)
