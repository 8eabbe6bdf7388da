"""Plain values as YAML 1.2 text, and back."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from pydantic import BaseModel

from threefold.errors import ConfigError, Problem

_SAME_IN_YAML_1_1 = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)\Z)[A-Za-z/].*", re.IGNORECASE | re.DOTALL
)

_WITHOUT_SPACE = re.compile(r"""\{\s*([\w.]+:)([^\s,:{}"']+)(?=\s*[,}])""")

# Nested aliases: a short text can expand beyond any memory.
_MOST_ENTRIES = 1_000_000


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
        return (
            "{"
            + ", ".join(
                f"{as_yaml(str(key))}: {as_yaml(entry)}" for key, entry in value.items()
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    return "null" if value is None else str(value)


def pasted(value: Any) -> str:
    """As `as_yaml`, quoted for the shell."""
    return shlex.quote(as_yaml(value))


def to_set(what: str, expected: str, key: str, value: Any, *, remark: str = "") -> Problem:
    """A problem whose fix is a value of a key, and a remark."""
    return Problem(what, expected, f"--{key} {pasted(value)}{remark}", (key, value, remark))


def parse(text: str, origin: str) -> Any:
    """The value of YAML 1.2 text; ConfigError names its `origin`, a file or the key that the text was given for."""
    from ruamel.yaml.error import YAMLError

    try:
        value = read_yaml(text)
    # Besides syntax: a date that does not exist, more digits than an int may have, a mapping inside itself.
    except (YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = (
            f"{origin}, line {mark.line + 1}" if mark is not None and "\n" in text else origin
        )
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        fix = f"text needs quotes inside the shell's quotes: {pasted(text.strip())}"
        raise ConfigError(
            f"{place}: {reason}",
            expected="YAML 1.2",
            fix=fix if "\n" not in text else "correct the line",
        ) from None
    pair = _WITHOUT_SPACE.search(text)
    if pair and isinstance(value, dict) and pair[1] + pair[2] in value:
        spaced = _WITHOUT_SPACE.sub(r"{\1 \2", text)
        raise ConfigError(
            f"{origin}: {pair[1]}{pair[2]} is a key, without a value",
            expected="a space after the colon that ends a key",
            fix=f"write {shlex.quote(spaced)}",
        )
    return value


def read_yaml(text: str) -> Any:
    """The value of YAML text, mappings and lists as plain ones; ruamel's own errors if it is not YAML."""
    from ruamel.yaml import YAML

    return _plain(YAML(typ="safe", pure=True).load(text), count())


def dump(config: BaseModel, *, nulls: bool = True) -> str:
    """A config as YAML text that `loading.load` reads back; `nulls`: with the keys whose value is null."""
    return as_document(config.model_dump(mode="json", exclude_none=not nulls))


def as_document(*documents: Mapping[str, Any]) -> str:
    """Returns plain mappings as YAML documents, with multi-line text as lines; they read the same in YAML 1.1 and 1.2.

    YAML 1.1, which kubectl reads, takes more texts for other values: `on` and `NO`, `1_000`, `12:30:45`.
    """
    import io

    from ruamel.yaml import YAML
    from ruamel.yaml.representer import SafeRepresenter

    class InLines(SafeRepresenter):
        pass

    def in_lines(representer: Any, text: str) -> Any:
        lines = text.split("\n")
        whole = not text[:1].isspace() and all(
            line.isprintable() and line == line.rstrip() for line in lines
        )
        style = (
            "|"
            if len(lines) > 1 and whole
            else None
            if _SAME_IN_YAML_1_1.fullmatch(text)
            else '"'
        )
        return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    InLines.add_representer(str, in_lines)
    InLines.ignore_aliases = lambda representer, value: True  # type: ignore[method-assign, assignment]
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = InLines
    yaml.default_flow_style = False
    yaml.width = 10_000
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    texts = []
    for document in documents:
        buffer = io.StringIO()
        yaml.dump(document, buffer)
        texts.append(buffer.getvalue())
    return "---\n".join(texts)


def _plain(value: Any, numbers: Iterator[int]) -> Any:
    if next(numbers) > _MOST_ENTRIES:
        raise ValueError(f"its aliases (*name) stand for more than {_MOST_ENTRIES:,} entries")
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, numbers) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry, numbers) for entry in value]
    return value


def _is_plain_text(text: str) -> bool:
    from ruamel.yaml.error import YAMLError

    try:
        # Some characters mean something only inside brackets, some only outside of them, some only in a key.
        return read_yaml(text) == text and read_yaml(f"{{{text}: [{text}]}}") == {text: [text]}
    except (YAMLError, ValueError, RecursionError):
        return False
