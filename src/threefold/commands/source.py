"""The options that name a source and what is learnt of it, as `data prepare` and `data show` take them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from threefold.errors import ConfigError, ThreefoldError

if TYPE_CHECKING:
    from threefold.data.text.source import Source

SOURCE_HELP = "stdlib, a file, folder or glob, hf:ID; several: --source A --source B."
# Key of the config's `data` section -> what its option says; a switch is given without a value.
_TEXTS = {
    "text_field": "Field with the text in rows; default: text.",
    "split": "Split of a Hub dataset; default: train.",
    "config_name": "Configuration of a Hub dataset.",
    "revision": "Branch, tag or commit of a Hub dataset.",
    "format": "text, chat, prompt_completion or preference; default: by the columns.",
    "fields": "The source's names of columns and keys: '{messages: dialog, role: speaker}'.",
    "train_on": "What is learnt: assistant, last, completion or all; default: assistant for chats, else completion.",
    "chat_template": "File with a chat template; default: the tokenizer's own.",
    "template_variables": "Variables of the chat template: '{enable_thinking: false}'.",
    "chat_date": "Date for chat templates that print today's: 2026-01-31.",
    "control_tokens": "Control tokens spelled out in a conversation: text (they stay it) or ids.",
    "bos": "A token that begins each text: true, false, or auto: as the tokenizer does.",
}
_SWITCHES = {
    "skip_bad_lines": "Count unreadable input instead of refusing it.",
    "no_train_on_end": "The end token of what is learnt is not learnt.",
    "skip_empty_targets": "Count rows of which nothing is learnt, do not refuse them.",
}
_KEYS = re.compile(rf"--data\.(source|tokenizer|{'|'.join(_TEXTS)})\b|--data\.(skip_empty_targets) true\b")


def with_source_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a source, which it gets as further keywords."""
    own = inspect.signature(command, eval_str=True)
    parameters = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    for kind, default, options in ((str | None, None, _TEXTS), (bool, False, _SWITCHES)):
        for key, help in options.items():
            option = Annotated[kind, typer.Option(option_of(key), help=help)]  # type: ignore[valid-type]
            parameters.append(
                inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
            )
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def option_of(key: str) -> str:
    """The option of a key."""
    return f"--{key.replace('_', '-')}"


def source_of(given: Mapping[str, Any]) -> Source:
    """The source that options name; `given`: by the keys of the config's `data` section, None or False: not given.

    Raises:
        ConfigError: a value that its key cannot have.
    """
    from threefold.config.loading import validate
    from threefold.config.text import parse
    from threefold.data.store.resolve import refuse_without_effect
    from threefold.run.sources import sources_of

    values = {key: value for key, value in given.items() if value not in (None, False)}
    if values.pop("no_train_on_end", False):
        values["train_on_end"] = False
    if "bos" in values:
        values["bos"] = parse(values["bos"], "--bos")
    for key in {"fields", "template_variables"} & {*values}:
        values[key] = parse(values[key], option_of(key))
        if not isinstance(values[key], dict):
            what, fix = f"{option_of(key)} {given[key]} is not a mapping", f"{option_of(key)} '{{NAME: VALUE}}'"
            raise ConfigError(what, expected="names and values", fix=fix)
    names = values["source"]
    values["source"] = names[0] if len(names) == 1 else names
    source = sources_of(validate({"data": values}))["data.source"]
    refuse_without_effect([source])
    return source


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
    """Fixes speak of a config's keys, which these commands take as flags of their own."""

    def own(text: str) -> str:
        return _KEYS.sub(lambda found: option_of(found[1] or found[2]), text)

    try:
        yield
    except ThreefoldError as error:
        raise type(error).of(
            dataclasses.replace(each, expected=own(each.expected), fix=own(each.fix)) for each in error.problems
        ) from error
