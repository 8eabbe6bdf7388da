"""A config as a YAML document for people: every key below its section, with a comment. `loading.load` reads it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from threefold.config.described import keys_in
from threefold.config.loading import LoadedConfig
from threefold.config.schema import Config, inner_sections, value_at
from threefold.config.text import as_yaml

_INDENT = "  "
_WIDTH = 30  # of a key and its value, where the comment begins if they are shorter


def with_values(loaded: LoadedConfig, automatic: Mapping[str, str]) -> str:
    """Every key with its value; the comment says what an automatic one becomes here, and where it came from.

    Args:
        automatic: section.key -> what the run takes for it, and why.
    """

    def comment(key: str, meaning: str) -> str:
        origin = loaded.origins.get(key, "")
        return "; ".join(filter(None, (automatic.get(key), origin)))

    return "\n".join(_document(loaded.config, lambda key: True, comment))


def with_meanings(loaded: LoadedConfig) -> str:
    """Every key with its meaning; those that were not given are commented out, at their defaults."""
    return "\n".join(_document(loaded.config, loaded.origins.__contains__, lambda key, meaning: meaning))


def _document(config: Config, is_active: Callable[[str], bool], comment: Callable[[str, str], str]) -> Iterator[str]:
    for section in Config.model_fields:
        yield f"{section}:"
        inside = None
        for each in keys_in(section):
            inner, _, name = each.key.rpartition(".")
            key = f"{section}.{each.key}"
            if inner and inner != inside:
                any_active = any(
                    is_active(f"{section}.{inner}.{own}") for own in inner_sections(section)[inner].model_fields
                )
                yield _line(_INDENT, f"{inner}:", "", active=any_active)
            inside = inner
            entry = f"{name}: {as_yaml(value_at(config, key))}"
            depth = _INDENT * (2 if inner else 1)
            yield _line(depth, entry, comment(key, each.meaning), active=is_active(key))
        yield ""


def _line(indent: str, entry: str, comment: str, *, active: bool) -> str:
    entry = f"{indent}{entry}" if active else f"{_INDENT}# {indent.removeprefix(_INDENT)}{entry}"
    # A path may contain a line break, at which a comment would end.
    return f"{entry:<{_WIDTH}}  # {' '.join(comment.split())}" if comment else entry
