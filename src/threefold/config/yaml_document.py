"""A config as a YAML document for people: every key below its section, with a comment. `loading.load` reads it back."""

from collections.abc import Collection, Mapping

from threefold.config.described import every_key_described
from threefold.config.loading import LoadedConfig
from threefold.config.schema import Config, every_key, value_at
from threefold.config.yaml_text import as_yaml

_WIDTH = 30  # of a key and its value, where the comment begins if they are shorter


def with_values(loaded: LoadedConfig, automatic: Mapping[str, str]) -> str:
    """Every key with its value; the comment gives the resolved value of an automatic one here, and its origin.

    Args:
        automatic: section.key -> the value that the run uses for it, and why.
    """
    sources = (automatic, loaded.origins)
    comments = {
        key: "; ".join(source[key] for source in sources if key in source)
        for key in every_key()
    }
    return _document(loaded.config, comments, active=comments)


def with_meanings(loaded: LoadedConfig) -> str:
    """Every key with its meaning; those that were not given are commented out, at their defaults."""
    meanings = {key: about.meaning for key, about in every_key_described()}
    return _document(loaded.config, meanings, active=loaded.origins)


def _document(config: Config, comments: Mapping[str, str], active: Collection[str]) -> str:
    lines: list[str] = []
    before = [""]
    for key, comment in comments.items():
        *sections, name = key.split(".")
        if sections[0] != before[0]:
            lines += ["", f"{sections[0]}:"]
        if sections[1:] and sections != before:
            below = any(each.startswith(".".join(sections)) for each in active)
            lines.append(_line(1, f"{sections[1]}:", "", active=below))
        entry = f"{name}: {as_yaml(value_at(config, key))}"
        lines.append(_line(len(sections), entry, comment, active=key in active))
        before = sections
    return "\n".join(lines[1:])


def _line(depth: int, entry: str, comment: str, *, active: bool) -> str:
    mark = "  " if active else "  # "
    entry = mark + "  " * (depth - 1) + entry
    # A path may contain a line break, at which a comment would end.
    return f"{entry:<{_WIDTH}}  # {' '.join(comment.split())}" if comment else entry
