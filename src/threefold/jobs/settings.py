"""The settings of a kind of job: fields of a dataclass, which are the options of its command. No torch.

A field made with `setting` is an option; its type determines how a value is read, and whether the option may be
repeated. The command's help and its checks are made from the fields, so a setting is written once.
"""

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from threefold.config.dropped import DROPPED
from threefold.errors import ConfigError, Problem
from threefold.jobs.job import named_pairs, variables

_TRUTH = {"true": True, "false": False}
Kind = TypeVar("Kind")


def setting(
    help: str,
    default: Any = None,
    *,
    option: str = "",
    form: str = "",
    example: str = "",
    least: int | None = None,
    most: int | None = None,
    secret_fix: str = "",
) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: `...` for one that must be given. Of a tuple or a mapping: none by default.
        option: its name without dashes, if it is not the field's.
        form, example: of a repeatable NAME=VALUE; in its help and its error.
        least, most: bounds of a number.
        secret_fix: the setting holds variables of the job; what to do instead for one that is a secret.
    """
    metadata: dict[str, Any] = {
        "help": help,
        "option": option,
        "form": form,
        "example": example,
        "least": least,
        "most": most,
        "secret_fix": secret_fix,
    }
    if default is ...:
        return dataclasses.field(metadata=metadata)
    if default in ((), {}):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class JobSetting(NamedTuple):
    """A field as an option; `kind`: bool, int, str, Path, tuple or Mapping, of which the last two are repeatable."""

    field: str
    option: str
    kind: Any
    inner: Any
    info: Mapping[str, Any]
    required: bool
    default: Any

    @property
    def form(self) -> str:
        """The text after the option's name."""
        if self.info["form"]:
            return str(self.info["form"])
        return {bool: "", int: "N", Path: "FILE"}.get(
            self.inner if self.kind is tuple else self.kind, "TEXT"
        )


def settings_of(kind: type) -> list[JobSetting]:
    """The settings of a dataclass, in the order of its fields."""
    hints = get_type_hints(kind)
    settings = []
    for entry in dataclasses.fields(kind):
        if "help" not in entry.metadata:
            continue
        hint = hints[entry.name]
        if get_origin(hint) in (Union, types.UnionType):
            (hint,) = (part for part in get_args(hint) if part is not type(None))
        outer = get_origin(hint) or hint
        inner = (get_args(hint) or (None,))[0]
        outer = Mapping if isinstance(outer, type) and issubclass(outer, Mapping) else outer
        option = entry.metadata["option"] or entry.name.replace("_", "-")
        missing = (
            entry.default is dataclasses.MISSING
            and entry.default_factory is dataclasses.MISSING
        )
        default = None if entry.default is dataclasses.MISSING else entry.default
        settings.append(
            JobSetting(
                entry.name, f"--{option}", outer, inner, entry.metadata, missing, default
            )
        )
    return settings


def described(kind: type) -> Iterator[tuple[str, str]]:
    """(`--option FORM`, its help) of every setting, for the help of the command."""
    for each in settings_of(kind):
        notes = ["repeatable"] if each.kind in (tuple, Mapping) else []
        if each.required:
            notes.append("required")
        elif each.default not in (None, False, ""):
            notes.append(
                f"default: {str(each.default).lower() if each.kind is bool else each.default}"
            )
        yield (
            f"{each.option} {each.form}".rstrip(),
            each.info["help"] + (f" ({', '.join(notes)})" if notes else ""),
        )


def read(
    kind: type[Kind], arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[Kind, list[str]]:
    """The settings in a command line, and the arguments that are not settings.

    Args:
        environ: where variables of the job get the values that the command line does not give.

    Raises:
        ConfigError: a value is missing or cannot be read; all of them at once.
    """
    settings = settings_of(kind)
    problems: list[Problem] = []
    texts, rest = _split({each.option: each for each in settings}, arguments, problems)
    values: dict[str, Any] = {}
    for spec in settings:
        try:
            if spec.field in texts:
                values[spec.field] = _value(spec, texts[spec.field], environ)
            elif spec.required:
                problems.append(
                    Problem(
                        f"no {spec.option}", spec.info["help"], f"{spec.option} {spec.form}"
                    )
                )
        except ConfigError as error:
            problems += error.problems
    ConfigError.raise_for(problems)
    return kind(**values), rest


def _split(
    by_option: Mapping[str, JobSetting], arguments: Sequence[str], problems: list[Problem]
) -> tuple[dict[str, list[str]], list[str]]:
    """({field: texts}, the other arguments); a config's key has a dot in its name, an option has none."""
    texts: dict[str, list[str]] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        name, equals, text = argument.partition("=")
        spec = by_option.get(name)
        is_last = not queue or queue[0].startswith("--")
        negated = (
            by_option.get(name.replace("--no-", "--", 1)) if name.startswith("--no-") else None
        )
        if (
            spec is not None
            and spec.kind is bool
            and not equals
            and (is_last or queue[0] not in _TRUTH)
        ):
            texts[spec.field] = ["true"]
        elif spec is not None and not equals and is_last:
            problems.append(
                Problem(f"{name} has no value", spec.info["help"], f"{name} {spec.form}")
            )
        elif spec is not None:
            texts.setdefault(spec.field, []).append(text if equals else queue.pop(0))
        elif negated is not None and negated.kind is bool:
            texts[negated.field] = ["false"]
        elif name.startswith("--") and "." not in name:
            near = difflib.get_close_matches(name, by_option, n=1)
            fix = (
                f"did you mean {near[0]}?" if near else "the command's --help lists its options"
            )
            fix = DROPPED.get(name.removeprefix("--"), fix)
            problems.append(
                Problem(f"unknown option {name}", f"one of {', '.join(by_option)}", fix)
            )
            del queue[: not is_last]
        else:
            rest.append(argument)
            if name.startswith("--") and not equals and queue:
                rest.append(queue.pop(0))
    return texts, rest


def _value(spec: JobSetting, texts: Sequence[str], environ: Mapping[str, str]) -> Any:
    info = spec.info
    if info["secret_fix"]:
        return variables(texts, environ, secret_fix=info["secret_fix"])
    if spec.kind is Mapping:
        return named_pairs(texts, spec.option, info["form"], example=info["example"])
    if spec.kind is tuple:
        return tuple(spec.inner(text) for text in texts)
    if len(texts) > 1:
        raise ConfigError(
            f"{spec.option} is given {len(texts)} times",
            expected="one value",
            fix=f"{spec.option} {texts[-1]}",
        )
    (text,) = texts
    if spec.kind is bool:
        if text not in _TRUTH:
            raise ConfigError(
                f"{spec.option} = {text!r}",
                expected="true or false",
                fix=f"{spec.option} true",
            )
        return _TRUTH[text]
    if spec.kind is not int:
        return spec.kind(text)
    least, most = info["least"], info["most"]
    fits = (
        text.isascii()
        and text.isdecimal()
        and (least or 0) <= int(text)
        and (most is None or int(text) <= most)
    )
    if not fits:
        raise ConfigError(
            f"{spec.option} = {text!r}",
            expected="a whole number"
            + (f" of at least {least}" if least else "")
            + (f", at most {most}" if most else ""),
            fix=f"{spec.option} {least or 1}",
        )
    return int(text)
