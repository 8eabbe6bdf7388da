"""Plain values as YAML 1.2 text that fits one line, and back."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


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


def pasted(value: Any) -> str:
    """As `as_yaml`, quoted for the shell."""
    return shlex.quote(as_yaml(value))


def read_yaml(text: str) -> Any:
    from ruamel.yaml import YAML

    return _plain(YAML(typ="safe", pure=True).load(text))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def _is_plain_text(text: str) -> bool:
    from ruamel.yaml.error import YAMLError

    try:
        # Some characters mean something only inside brackets, some only outside of them, some only in a key.
        return read_yaml(text) == text and read_yaml(f"{{{text}: [{text}]}}") == {text: [text]}
    except (YAMLError, ValueError, RecursionError):
        return False
