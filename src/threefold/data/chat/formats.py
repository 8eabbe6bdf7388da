"""Rows of instruction data as conversations: which columns hold what, and what is wrong with a row.

The columns are those of the datasets that TRL reads: `messages`, ShareGPT's `conversations`, `prompt` and `completion`
(texts or messages), Alpaca's `instruction`, `input` and `output`, and `chosen` and `rejected` with or without a
`prompt`. `data.fields` maps other names to these. A row becomes one `Example` (two of a preference, in `preference`),
or is refused by a RowError.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from threefold.config.yaml_text import pasted
from threefold.data.text.source import kind_of
from threefold.errors import ConfigError
from threefold.jsonl import Values, from_json

FORMATS = ("text", "chat", "prompt_completion", "preference")
# Format -> the sets of columns that make it, the first complete one counts.
_COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "preference": (("chosen", "rejected"),),
    "chat": (("messages",), ("conversations",)),
    "prompt_completion": (("prompt", "completion"), ("instruction", "output")),
}
# Columns that a row may have besides; a later row may have one that the first has not.
_BESIDE = ("system", "tools", "chat_template_kwargs")
_OPTIONAL = {
    "text": (),
    "chat": _BESIDE,
    "prompt_completion": ("input", *_BESIDE),
    "preference": ("prompt", *_BESIDE),
}
_TWO_PARTS = ("prompt", "completion", "instruction", "input", "output", "chosen", "rejected")
FIELDS = ("text", "messages", "conversations", "role", "content", *_TWO_PARTS, *_BESIDE)
# ShareGPT's names of who speaks, and those of other collections.
_ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "model", "function_call")
_ROLES = {"human": "user", **dict.fromkeys(_ASSISTANTS, "assistant")}
_ROLES |= dict.fromkeys(("observation", "function_response", "ipython"), "tool")
# What other collections call our columns: unread, rows would be trained on without them.
_ALSO_CALLED = dict.fromkeys(("instruction", "question", "query"), "prompt")
_ALSO_CALLED["system_prompt"] = "system"
# No column of ours holds these.
_NOT_READ = {
    "history": "rows with `messages`, which hold every turn",
    "input": "rows with `messages`, which hold the whole question",
    "label": "a source of only the rows to learn from",
}
_KNOWN = ("system", "developer", "user", "assistant", "tool", "function")
NO_JSON = "\ufdd2"
"""A character that is in no text: it stands before the type of a value that JSON does not have."""
Message = dict[str, Any]
Messages = Sequence[Message]


class RowError(Exception):
    """Why a row cannot be used: `what` is wrong with it, what was `expected`, the data.train_on that could use it."""

    def __init__(self, what: str, expected: str, *, train_on: str | None = None) -> None:
        super().__init__(what)
        self.what, self.expected, self.train_on = what, expected, train_on


@dataclass(frozen=True)
class Columns:
    """The kind of a source's rows: their format, and the columns that are read.

    Attributes:
        fields: our name of a column, or of a key of its messages -> the source's name for it.
    """

    format: str
    names: tuple[str, ...]
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The columns that are read of a row that has them."""
        return (
            *self.names,
            *(name for name in _OPTIONAL[self.format] if name not in self.names),
        )

    def theirs(self, names: Sequence[str]) -> tuple[str, ...]:
        """The source's names of some columns."""
        return tuple(self.fields.get(name, name) for name in names)


@dataclass(frozen=True)
class Example:
    """One row: messages, or two texts; the first `num_prompt` messages (or the first text) are the prompt.

    Attributes:
        tools: the functions that the model may call, as JSON schemas.
        variables: for the chat template, for this row.
        untrained: the messages (by number) that are not trained on, whatever data.train_on is.
    """

    messages: tuple[Message, ...] = ()
    texts: tuple[str, str] | None = None
    num_prompt: int = 0
    tools: tuple[Any, ...] | None = None
    variables: Values = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()


def in_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, messages or ids two sequences begin with in common."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])


def columns_of(
    names: Sequence[str], *, format: str = "auto", fields: Mapping[str, str] | None = None
) -> Columns:
    """The contents of rows with these columns.

    Raises:
        ConfigError: they are of no format or, with `auto`, of several; or lack a column of the requested format.
    """
    renamed = dict(fields or {})
    readable = formats_in(names, fields=renamed)
    matching = list(readable)
    if format == "auto" and len(matching) > 1:
        raise ConfigError(
            f"data.format = auto: the columns {', '.join(names)} match {' and '.join(matching)}",
            expected="a single format: otherwise what is trained on would be a guess",
            fix=f"--data.format {matching[-1]}   (or {', '.join(reversed(matching[:-1]))})",
        )
    chosen = (matching[0] if matching else None) if format == "auto" else format
    if chosen is None or chosen not in readable:
        sets = [
            columns
            for each, sets in _COLUMNS.items()
            if chosen in (None, each)
            for columns in sets
        ]
        wanted = " or ".join(
            " + ".join(columns) for columns in (*sets, *([("text",)] if chosen is None else []))
        )
        raise ConfigError(
            f"data.format = {format}: the columns are {', '.join(names) or 'none'}",
            expected=f"the columns {wanted}",
            fix=f"name them: --data.fields '{{{sets[0][0] if sets else 'messages'}: {names[0] if names else 'NAME'}}}'",
        )
    present = {name for name in _OPTIONAL[chosen] if renamed.get(name, name) in names}
    optional = (
        name for name in _OPTIONAL[chosen] if name in present and name not in readable[chosen]
    )
    columns = Columns(chosen, (*readable[chosen], *optional), renamed)
    if format == "auto":
        _refuse_unread(columns, names)
    return columns


def _refuse_unread(columns: Columns, names: Sequence[str]) -> None:
    """ConfigError for columns that by their names say what a row means, and would not be read."""
    missing = {*_OPTIONAL[columns.format]} - {*columns.names}
    renamed = {_ALSO_CALLED[name]: name for name in names if _ALSO_CALLED.get(name) in missing}
    used = columns.theirs(columns.names)
    unread = [
        name
        for name in _NOT_READ
        if columns.format != "chat" and name in names and name not in used
        if name != "label" or "completion" in columns.names
    ]
    if renamed or unread:
        fix = f"--data.fields {pasted({**columns.fields, **renamed})}"
        raise ConfigError(
            f"data.format = auto: the rows would be read as {columns.format} ({', '.join(used)}), "
            f"without {', '.join([*renamed.values(), *unread])}",
            expected="every column that says what is asked, or which answers to learn from",
            fix=f"{_NOT_READ[unread[0]] if unread else fix}   (or, without: --data.format {columns.format})",
        )


def formats_in(
    names: Sequence[str], *, fields: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Each format that rows with these columns can be read as, and the columns that make it.

    Raises:
        ConfigError: `fields` has an unknown key, or names a column that does not exist.
    """
    _refuse_unknown(fields, names)
    present = {ours for ours in FIELDS if fields.get(ours, ours) in names}
    formats: dict[str, tuple[str, ...]] = {"text": ("text",)} if "text" in present else {}
    for format in FORMATS[1:]:
        if complete := [columns for columns in _COLUMNS[format] if present.issuperset(columns)]:
            formats[format] = complete[0]
    return formats


def _refuse_unknown(fields: Mapping[str, str], names: Sequence[str]) -> None:
    """ConfigError for a key of data.fields that is unknown, or that names a column which does not exist."""
    for ours, theirs in fields.items():
        if ours not in FIELDS:
            nearest = difflib.get_close_matches(ours, FIELDS, 1)
            raise ConfigError(
                f"data.fields has {ours!r}, which is not a field",
                expected=f"one of {', '.join(FIELDS)}",
                fix=f"--data.fields '{{{nearest[0] if nearest else FIELDS[0]}: {theirs}}}'",
            )
        # A text may be inside another field; its reader names those that exist.
        if ours not in ("role", "content", "text") and theirs not in names:
            nearest = difflib.get_close_matches(theirs, names, 1) or list(names[:1]) or ["NAME"]
            raise ConfigError(
                f"data.fields has {ours}: {theirs}, but there is no column {theirs!r}",
                expected=f"one of the columns: {', '.join(names) or 'none'}",
                fix=f"--data.fields '{{{ours}: {nearest[0]}}}'",
            )


def example_of(row: Values, columns: Columns) -> Example:
    """The example of one row of conversations, or of prompt and completion (`preference` makes two of such).

    Raises:
        RowError: a column is missing, null, or of another form.
    """
    values = values_of(row, columns)
    tools = _tools(values.get("tools"))
    variables = _variables(values.get("chat_template_kwargs"))
    if columns.format == "chat":
        name = columns.names[0]
        messages = _messages(_given(values, name), name, columns)
        return _example(_with_system(values, messages), 0, tools, variables)
    prompt, completion = _prompt_and_completion(values, columns)
    prompt = _with_system(values, prompt)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise RowError("the completion is empty", "a text after the prompt")
        return Example(texts=(prompt, completion), tools=tools, variables=variables)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RowError(
            f"the prompt is {kind_of(prompt)} and the completion {kind_of(completion)}",
            "two texts, or two lists of messages",
        )
    asked = _messages(prompt, "prompt", columns)
    answered = _messages(completion, "completion", columns)
    return _example([*asked, *answered], len(asked), tools, variables)


def values_of(row: Values, columns: Columns) -> Values:
    """The columns that are read, the same from any kind of file: no object contains a null, and all of it is JSON.

    Arrow gives each object the keys of all others in its place, as nulls, so a null may mean a missing key.
    A value that JSON does not have, such as a date, has no definite text: a template that writes it is refused.
    """
    return {
        name: _as_json(row.get(columns.fields.get(name, name))) for name in columns.all_names
    }


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    plain = value is None or isinstance(value, str | int | float)
    return value if plain else f"{NO_JSON}{type(value).__name__}"


def _example(
    messages: Messages, num_prompt: int, tools: tuple[Any, ...] | None, variables: Values
) -> Example:
    untrained = frozenset(
        number for number, message in enumerate(messages) if not message.get("train", True)
    )
    shown = tuple(
        {key: value for key, value in message.items() if key != "train"} for message in messages
    )
    return Example(shown, None, num_prompt, tools, variables, untrained)


def _with_system(values: Values, messages: Any) -> Any:
    """Messages that begin with the row's system text, if it has one and they do not."""
    system = values.get("system")
    if not system:
        return messages
    if not isinstance(system, str) or not isinstance(messages, list):
        raise RowError(
            f"'system' is {kind_of(system)}, beside {kind_of(messages)}",
            "a system text beside messages   (or data.fields without it, and texts that hold it)",
        )
    begins = (
        bool(messages)
        and isinstance(messages[0], Mapping)
        and messages[0].get("role") == "system"
    )
    return messages if begins else [{"role": "system", "content": system}, *messages]


def _given(values: Values, name: str) -> Any:
    if values.get(name) is None:
        raise RowError(f"{name!r} is missing or null", f"{name!r} in every row")
    return values[name]


def _prompt_and_completion(values: Values, columns: Columns) -> tuple[Any, Any]:
    if "instruction" not in columns.names:
        return _given(values, "prompt"), _given(values, "completion")
    instruction, more, output = (
        _given(values, "instruction"),
        values.get("input"),
        _given(values, "output"),
    )
    for name, text in (("instruction", instruction), ("input", more or ""), ("output", output)):
        if not isinstance(text, str):
            raise RowError(
                f"{name!r} is {kind_of(text)}, not text",
                "instruction, input and output as texts",
            )
    question = [
        {"role": "user", "content": f"{instruction}\n\n{more}" if more else instruction}
    ]
    return question, [{"role": "assistant", "content": output}]


def _messages(value: Any, where: str, columns: Columns) -> list[Message]:
    if not isinstance(value, list | tuple):
        raise RowError(
            f"{where!r} is {kind_of(value)}, not a list of messages", "a list of messages"
        )
    if not value:
        raise RowError(f"{where!r} is an empty list", "at least one message")
    return [_message(each, f"{where}[{number}]", columns) for number, each in enumerate(value)]


def _message(value: Any, where: str, columns: Columns) -> Message:
    if not isinstance(value, Mapping):
        raise RowError(
            f"{where} is {kind_of(value)}, not a message", '{"role": ..., "content": ...}'
        )
    role_key = columns.fields.get("role", "role")
    content_key = columns.fields.get("content", "content")
    if role_key not in value and "from" in value:
        role_key, content_key = "from", columns.fields.get("content", "value")
    raw_role = value.get(role_key)
    if not isinstance(raw_role, str):
        raise RowError(
            f"{where} has no {role_key!r}"
            if raw_role is None
            else f"{where}: the role is {kind_of(raw_role)}",
            "a role",
        )
    role = _ROLES.get(raw_role, raw_role)
    if role not in _KNOWN:
        raise RowError(
            f"{where}: the role {raw_role!r} is not known",
            f"one of {', '.join((*_KNOWN, *_ROLES))}",
        )
    others = {
        key: each
        for key, each in value.items()
        if key not in (role_key, content_key, "weight", "train")
    }
    if not _trained(value, where):
        others["train"] = False
    content = value.get(content_key)
    if raw_role == "function_call":
        others["tool_calls"] = [{"type": "function", "function": _call(content, where)}]
        content = None
    if isinstance(calls := others.get("tool_calls"), list):
        others["tool_calls"] = [
            with_arguments(each, partial(_as_object, where=where)) for each in calls
        ]
    elif calls is not None:
        raise RowError(f"{where}: tool_calls is {kind_of(calls)}", "a list of calls")
    if content is None and not calls:
        raise RowError(
            f"{where} has no {content_key!r}", "a text in every message, or tool_calls"
        )
    if content is not None:
        others["content"] = _text(content, where)
    return {"role": role, **others}


def with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """A call whose arguments, if it has any, are changed; OpenAI's are under `function`."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": with_arguments(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: Any, where: str) -> Any:
    """Arguments as an object, also if they came as its JSON, as OpenAI has them."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return _as_json(from_json(arguments or "{}"))
    except ValueError as error:
        raise RowError(
            f"{where}: the arguments of a call are not JSON: {error}", "an object, or its JSON"
        ) from None


def _call(content: Any, where: str) -> Any:
    """The function that a message of ShareGPT's role function_call calls, which is JSON."""
    try:
        call = from_json(content)
    except (TypeError, ValueError):
        call = None
    if not isinstance(call, dict) or "name" not in call:
        raise RowError(
            f"{where}: a function_call that is not a call",
            '{"name": ..., "arguments": {...}} as JSON',
        )
    return call


def _trained(message: Values, where: str) -> bool:
    """Whether a message may be trained on: not with `weight: 0` (OpenAI, Mistral) or `train: false` (axolotl)."""
    for key in ("weight", "train"):
        if message.get(key, 1) not in (0, 1):  # true and false are equal to these
            raise RowError(
                f"{where}: {key!r} is {message[key]!r}",
                f"{key!r} as 0 or 1, false or true: a message is trained on, or it is not",
            )
    return bool(message.get("weight", 1) and message.get("train", 1))


def _text(content: Any, where: str) -> str:
    if isinstance(content, list) and content:
        # The parts of multimodal messages, where all of them are text.
        parts = [
            part.get("text")
            if isinstance(part, Mapping) and part.get("type") == "text"
            else None
            for part in content
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise RowError(
            f"{where}: the content is {kind_of(content)}, not text",
            "text (images and audio are not read)",
        )
    return content


def _tools(value: Any) -> tuple[Any, ...] | None:
    if value is None or value in ("", [], "[]"):
        return None
    if isinstance(value, str):
        try:
            value = _as_json(from_json(value))
        except ValueError as error:
            raise RowError(
                f"'tools' is not JSON: {error}", "a list of functions, or its JSON"
            ) from None
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise RowError(f"'tools' is {kind_of(value)}", "a list of functions as JSON schemas")
    return tuple(value)


def _variables(value: Any) -> Values:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(
            f"'chat_template_kwargs' is {kind_of(value)}",
            "names and values for the chat template",
        )
    return value
