"""Rows of instruction data: their formats found from their columns, and what is wrong with a row said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from threefold.config.yaml_text import pasted
from threefold.data.chat.formats import Columns, Example, RowError, columns_of, example_of
from threefold.data.chat.labeller import chat_template, format_of
from threefold.data.text.source import Labels, Source
from threefold.data.tokens import ByteTokenizer
from threefold.errors import ConfigError

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    ("names", "format", "shown"),
    [
        (["text", "id"], "text", "text (text)"),
        (["messages", "source"], "chat", "chat (messages)"),
        (["messages", "tools"], "chat", "chat (messages, tools)"),
        (["conversations", "system"], "chat", "chat (conversations, system)"),
        (["prompt", "prompt_id", "messages"], "chat", "chat (messages)"),
        (
            ["prompt", "completion"],
            "prompt_completion",
            "prompt_completion (prompt, completion)",
        ),
        (
            ["instruction", "input", "output"],
            "prompt_completion",
            "prompt_completion (instruction, output, input)",
        ),
        (
            ["instruction", "output"],
            "prompt_completion",
            "prompt_completion (instruction, output)",
        ),
        (
            ["prompt", "chosen", "rejected"],
            "preference",
            "preference (chosen, rejected, prompt)",
        ),
        (["chosen", "rejected"], "preference", "preference (chosen, rejected)"),
    ],
)
def test_format_is_found_from_the_columns(names: list[str], format: str, shown: str) -> None:
    found = columns_of(names)
    assert found.format == format and f"{format} ({', '.join(found.names)})" == shown


def test_columns_of_several_formats_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        columns_of(["prompt", "chosen", "rejected", "messages"])
    assert "match chat and preference" in str(caught.value)
    assert columns_of(["messages", "text"], format="chat").format == "chat"
    with pytest.raises(ConfigError, match="match text and chat"):
        columns_of(["messages", "text"])


@pytest.mark.parametrize(
    ("names", "unread", "fix"),
    [
        (["system", "question", "chosen", "rejected"], "question", {"prompt": "question"}),
        (
            ["instruction", "output", "system_prompt"],
            "system_prompt",
            {"system": "system_prompt"},
        ),
        (["messages", "system_prompt"], "system_prompt", {"system": "system_prompt"}),
        (
            ["instruction", "input", "chosen", "rejected"],
            "instruction, input",
            "rows with `messages`",
        ),
        (["instruction", "input", "output", "history"], "history", "rows with `messages`"),
        (["prompt", "completion", "label"], "label", "a source of only the rows to learn from"),
    ],
)
def test_columns_that_would_silently_be_lost(
    names: list[str], unread: str, fix: str | dict[str, str]
) -> None:
    """A question that no document has, or an answer that is not to be learnt, is no choice of `auto`."""
    with pytest.raises(ConfigError) as caught:
        columns_of(names)
    (problem,) = caught.value.problems
    assert problem.what.endswith(f", without {unread}")
    if isinstance(fix, dict):
        assert problem.fix.startswith(f"--data.fields {pasted(fix)} ")
        assert set(fix) < {*columns_of(names, fields=fix).names}
    else:
        assert problem.fix.startswith(fix)
    format = problem.fix.rpartition("--data.format ")[2].rstrip(")")
    assert columns_of(names, format=format).format == format


def test_columns_of_no_format_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.format = auto: the columns are a, b\n  expected: the columns chosen",
    ):
        columns_of(["a", "b"])
    with pytest.raises(
        ConfigError,
        match=r"expected: the columns prompt \+ completion or instruction \+ output\n",
    ):
        columns_of(["prompt"], format="prompt_completion")


def test_other_names_are_mapped() -> None:
    columns = columns_of(
        ["dialog", "id"], fields={"messages": "dialog", "role": "speaker", "content": "said"}
    )
    row = {
        "dialog": [
            {"speaker": "user", "said": "hi"},
            {"speaker": "assistant", "said": "hello", "weight": 1},
        ]
    }
    example = example_of(row, columns)
    assert example == Example((USER, ASSISTANT))
    assert columns.format == "chat" and columns.theirs(columns.names) == ("dialog",)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ASSISTANT]}, Example((USER, ASSISTANT))),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                ],
                "system": "s",
            },
            Example(({"role": "system", "content": "s"}, USER, ASSISTANT)),
        ),
        ({"prompt": "a", "completion": "b"}, Example(texts=("a", "b"))),
        (
            {"prompt": [USER], "completion": [ASSISTANT]},
            Example((USER, ASSISTANT), num_prompt=1),
        ),
        (
            {"instruction": "hi", "input": "", "output": "hello"},
            Example((USER, ASSISTANT), num_prompt=1),
        ),
        (
            {"instruction": "hi", "input": "x", "output": "hello"},
            Example(({"role": "user", "content": "hi\n\nx"}, ASSISTANT), num_prompt=1),
        ),
        (
            {"messages": [USER, {**ASSISTANT, "content": [{"type": "text", "text": "hello"}]}]},
            Example((USER, ASSISTANT)),
        ),
        (
            {
                "messages": [USER, {"role": "assistant", "tool_calls": [1], "content": None}],
                "tools": '[{"name": "f"}]',
            },
            Example((USER, {"role": "assistant", "tool_calls": [1]}), tools=({"name": "f"},)),
        ),
        (
            {"messages": [USER, ASSISTANT], "chat_template_kwargs": {"enable_thinking": False}},
            Example((USER, ASSISTANT), variables={"enable_thinking": False}),
        ),
    ],
)
def test_row_is_one_example(row: dict[str, Any], expected: Example) -> None:
    assert example_of(row, columns_of(list(row))) == expected


CHAT = Columns("chat", ("messages",))
PAIR = Columns("prompt_completion", ("prompt", "completion"))
ALPACA = Columns("prompt_completion", ("instruction", "output", "input"))


@pytest.mark.parametrize(
    ("row", "columns", "what"),
    [
        ({}, CHAT, "'messages' is missing or null"),
        ({"messages": None}, CHAT, "'messages' is missing or null"),
        ({"messages": "hi"}, CHAT, "'messages' is text, not a list of messages"),
        (
            {"messages": {"role": "user"}},
            CHAT,
            "'messages' is an object, not a list of messages",
        ),
        ({"messages": []}, CHAT, "'messages' is an empty list"),
        ({"messages": ["hi"]}, CHAT, "messages[0] is text, not a message"),
        ({"messages": [None]}, CHAT, "messages[0] is null, not a message"),
        ({"messages": [[USER]]}, CHAT, "messages[0] is a list, not a message"),
        ({"messages": [{"content": "hi"}]}, CHAT, "messages[0] has no 'role'"),
        (
            {"messages": [{"role": 1, "content": "hi"}]},
            CHAT,
            "messages[0]: the role is a number",
        ),
        (
            {"messages": [USER, {"role": "asistant", "content": "x"}]},
            CHAT,
            "messages[1]: the role 'asistant' is not known",
        ),
        ({"messages": [{"role": "user"}]}, CHAT, "messages[0] has no 'content'"),
        (
            {"messages": [{"role": "user", "content": None}]},
            CHAT,
            "messages[0] has no 'content'",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            CHAT,
            "messages[0]: the content is a number, not text",
        ),
        (
            {"messages": [{"role": "user", "content": True}]},
            CHAT,
            "messages[0]: the content is true or false, not text",
        ),
        (
            {"messages": [{"role": "user", "content": []}]},
            CHAT,
            "messages[0]: the content is a list, not text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            CHAT,
            "messages[0]: the content is a list, not text",
        ),
        ({"messages": [{"from": "human", "value": None}]}, CHAT, "messages[0] has no 'value'"),
        (
            {"messages": [USER], "tools": "{"},
            Columns("chat", ("messages", "tools")),
            "'tools' is not JSON: ",
        ),
        (
            {"messages": [USER], "tools": "5"},
            Columns("chat", ("messages", "tools")),
            "'tools' is a number",
        ),
        (
            {"messages": [USER], "tools": ["f"]},
            Columns("chat", ("messages", "tools")),
            "'tools' is a list",
        ),
        (
            {"messages": [USER], "chat_template_kwargs": 5},
            Columns("chat", ("messages", "chat_template_kwargs")),
            "'chat_template_kwargs' is a number",
        ),
        ({"prompt": "a"}, PAIR, "'completion' is missing or null"),
        ({"prompt": "a", "completion": ""}, PAIR, "the completion is empty"),
        (
            {"prompt": "a", "completion": [ASSISTANT]},
            PAIR,
            "the prompt is text and the completion a list",
        ),
        ({"prompt": 5, "completion": 6}, PAIR, "'prompt' is a number, not a list of messages"),
        ({"instruction": "a", "output": None}, ALPACA, "'output' is missing or null"),
        ({"instruction": ["a"], "output": "b"}, ALPACA, "'instruction' is a list, not text"),
        (
            {"instruction": "a", "input": 5, "output": "b"},
            ALPACA,
            "'input' is a number, not text",
        ),
    ],
)
def test_malformed_row_is_refused_in_words(
    row: dict[str, Any], columns: Columns, what: str
) -> None:
    with pytest.raises(RowError) as caught:
        example_of(row, columns)
    assert caught.value.what.startswith(what) and caught.value.expected


def test_column_that_only_a_later_row_has_is_read() -> None:
    columns = columns_of(["messages"])
    example = example_of(
        {"messages": [USER, ASSISTANT], "system": "s", "tools": [{"name": "f"}]}, columns
    )
    assert example.messages[0] == {"role": "system", "content": "s"} and example.tools == (
        {"name": "f"},
    )


def test_system_text_beside_prompt_and_completion_is_kept_or_refused() -> None:
    columns = columns_of(["prompt", "completion", "system"])
    example = example_of({"prompt": [USER], "completion": [ASSISTANT], "system": "s"}, columns)
    assert example.messages[0]["role"] == "system" and example.num_prompt == 2
    with pytest.raises(RowError, match="'system' is text, beside text"):
        example_of({"prompt": "a", "completion": "b", "system": "s"}, columns)


@pytest.mark.parametrize(
    ("fields", "what", "fix"),
    [
        (
            {"mesages": "dialog"},
            "data.fields has 'mesages', which is not a field",
            "--data.fields '{messages: dialog}'",
        ),
        (
            {"messages": "dialg"},
            "data.fields has messages: dialg, but there is no",
            "--data.fields '{messages: dialog}'",
        ),
        (
            {"messages": "dialog", "tools": "functons"},
            "data.fields has tools: functons, but there is no",
            "functions}'",
        ),
    ],
)
def test_misspelt_field_is_refused(fields: dict[str, str], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        columns_of(["dialog", "functions"], fields=fields)
    assert str(caught.value).startswith(what) and str(caught.value).endswith(fix)
    with pytest.raises(ConfigError):  # nor are such rows taken for text
        format_of(["dialog", "functions"], Source("x.jsonl", labels=Labels(fields=fields)))


def test_date_that_is_none_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ strftime_now('%Y') }}")
    wrong = "data.template_variables has date: 2026-13-01: "
    for variables, what in (
        ({"date": "2026-13-01"}, wrong),
        ({}, "the chat template prints today's"),
    ):
        with pytest.raises(ConfigError) as caught:
            chat_template(
                ByteTokenizer(),
                Labels(chat_template=str(tmp_path / "t.jinja"), template_variables=variables),
            )
        assert str(caught.value).startswith(what)
