"""Malformed rows in real files: each is named by its file and its line, or its row in a .parquet."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from threefold.data.chat.labeller import labeller_for
from threefold.data.store import prepare as stores
from threefold.data.store.open_source import open_text
from threefold.data.text.source import Labels, Source
from threefold.data.tokens import ByteTokenizer
from threefold.errors import DataError

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}{{ raise_exception('no tools: ' ~ message.content) }}{%- endif -%}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
LONG = "x" * 10_000_000


def chat(*messages: Any, **others: Any) -> dict[str, Any]:
    return {"messages": list(messages), **others}


def asked(**message: Any) -> dict[str, Any]:
    return chat({"role": "user", **message}, SAID)


# What stands in the line -> what is said of it. A text is the line itself.
CHATS: list[tuple[Any, str]] = [
    ("{", "not JSON: "),
    ('{"messages": [}', "not JSON: "),
    ("[" * 100_000, "not JSON: "),
    (
        '{"messages": [], "messages": []}',
        "not JSON: two values for the key 'messages' in an object",
    ),
    ('{"messages": [{"role": 1, "role": 2}]}', "not JSON: two values for the key 'role'"),
    ("[]", "a list, not an object"),
    ('"hi"', "text, not an object"),
    ("null", "null, not an object"),
    ({}, "'messages' is missing or null"),
    ({"messages": None}, "'messages' is missing or null"),
    ({"messages": "hi"}, "'messages' is text, not a list of messages"),
    (
        {"messages": {"role": "user", "content": "hi"}},
        "'messages' is an object, not a list of messages",
    ),
    (chat(), "'messages' is an empty list"),
    (chat("hi", SAID), "messages[0] is text, not a message"),
    (chat(ASKED, None), "messages[1] is null, not a message"),
    (chat([ASKED], SAID), "messages[0] is a list, not a message"),
    (chat({"content": "hi"}, SAID), "messages[0] has no 'role'"),
    (chat({"role": 5, "content": "hi"}, SAID), "messages[0]: the role is a number"),
    (chat({"role": "usr", "content": "hi"}, SAID), "messages[0]: the role 'usr' is not known"),
    (chat({"role": LONG, "content": "hi"}, SAID), "messages[0]: the role 'xxxxxxxx"),
    (chat({"from": "human"}, SAID), "messages[0] has no 'value'"),
    (asked(), "messages[0] has no 'content'"),
    (asked(content=None), "messages[0] has no 'content'"),
    (asked(content=5), "messages[0]: the content is a number, not text"),
    (asked(content=True), "messages[0]: the content is true or false, not text"),
    (asked(content={"text": "hi"}), "messages[0]: the content is an object, not text"),
    (
        asked(content=[{"type": "image", "url": "x"}]),
        "messages[0]: the content is a list, not text",
    ),
    (asked(content="\ud83d"), "half of a surrogate pair in the text"),
    (asked(content=LONG + "\udead"), "half of a surrogate pair in the text"),
    (chat(ASKED), "no token of it would be trained on"),
    (
        chat(ASKED, {"role": "tool", "content": LONG}, SAID),
        "the chat template refuses it: no tools: xxx",
    ),
    (
        chat(ASKED, SAID, tools=[{"name": "f"}]),
        "it has tools, but the chat template does not write them",
    ),
    (chat(ASKED, SAID, tools="{"), "'tools' is not JSON: "),
    (chat(ASKED, SAID, tools="[" * 100_000), "'tools' is not JSON: "),
    (
        chat(ASKED, {**SAID, "tool_calls": [{"name": "f", "arguments": "[" * 100_000}]}),
        "messages[1]: the arguments of a call are not JSON: ",
    ),
    (chat(ASKED, SAID, tools=[5]), "'tools' is a list"),
    (
        chat(ASKED, {**SAID, "tool_calls": [{"name": "f"}]}),
        "it has tool_calls, but the chat template does not write",
    ),
    (chat(ASKED, SAID, system=5), "'system' is a number, beside a list"),
    (chat(ASKED, SAID, chat_template_kwargs=[1]), "'chat_template_kwargs' is a list"),
]
PAIRS: list[tuple[Any, str]] = [
    ({"prompt": "a"}, "'completion' is missing or null"),
    ({"prompt": None, "completion": "b"}, "'prompt' is missing or null"),
    ({"prompt": "a", "completion": ""}, "the completion is empty"),
    ({"prompt": "a", "completion": [SAID]}, "the prompt is text and the completion a list"),
    ({"prompt": 5, "completion": 6}, "'prompt' is a number, not a list of messages"),
    ({"prompt": [], "completion": [SAID]}, "'prompt' is an empty list"),
    ({"prompt": "a\ud83d", "completion": "b"}, "half of a surrogate pair in the text"),
    ({"prompt": "a", "completion": "\udc80"}, "half of a surrogate pair in the text"),
]
CASES = [(chat(ASKED, SAID), *each) for each in CHATS] + [
    ({"prompt": "a", "completion": "b"}, *each) for each in PAIRS
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text(TEMPLATE)
    Path("rows").mkdir()
    return tmp_path


def prepared(name: str, **options: Any) -> stores.PreparedStore:
    source = Source(name, labels=Labels(chat_template="t.jinja"), **options)
    return stores.prepare(
        open_text(source, labeller_for(source, ByteTokenizer())),
        ByteTokenizer(),
        to=Path("store"),
    )


def refused(name: str) -> list[str]:
    with pytest.raises(DataError) as caught:
        prepared(name)
    assert all(problem.expected and problem.fix for problem in caught.value.problems)
    return [problem.what for problem in caught.value.problems]


def test_cases_are_at_least_thirty() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize(("good", "bad", "what"), CASES, ids=[each[2][:40] for each in CASES])
def test_malformed_line_is_named_by_file_and_line(good: Any, bad: Any, what: str) -> None:
    """After a file of its own and, in its file, after 41 lines, of which some are blank."""
    lines = [json.dumps(good)] * 38
    Path("rows/a.jsonl").write_text("\n".join(lines) + "\n")
    lines[20:20] = ["", "  ", "\t"]
    line = bad if isinstance(bad, str) else json.dumps(bad)
    Path("rows/b.jsonl").write_text("\n".join([*lines, line, json.dumps(good)]) + "\n")
    (found,) = refused("rows")
    assert found.startswith(f"rows/b.jsonl, line 42: {what}"), found[:200]
    assert len(found) < 600, "a long row does not fill the screen"


@pytest.mark.examples
def test_malformed_line_of_a_later_piece_is_named_by_its_line() -> None:
    """Files are read in pieces of 4 MiB, some of them at the same time."""
    turn = {"role": "user", "content": "x" * 400_000}
    lines = (
        [json.dumps(chat(turn, SAID))] * 11
        + [json.dumps(chat(turn))]
        + [json.dumps(chat(ASKED, SAID))] * 3
        + ["{"]
    )
    Path("rows/a.jsonl").write_text("\n".join(lines) + "\n")
    first, second = refused("rows/a.jsonl")
    assert first.startswith("rows/a.jsonl, line 12: no token") and second.startswith(
        "rows/a.jsonl, line 16: not JSON"
    )


@pytest.mark.slow
def test_turn_of_ten_megabytes_is_read() -> None:
    Path("rows/a.jsonl").write_text(
        json.dumps(chat({"role": "user", "content": LONG}, SAID)) + "\n"
    )
    made = prepared("rows/a.jsonl").open()
    assert (
        made.info is not None
        and made.info.num_loss_tokens == len("hello") + 1
        and made.num_tokens > len(LONG)
    )


PARQUET: list[tuple[Any, str]] = [
    ({"messages": None}, "'messages' is missing or null"),
    ({"messages": []}, "'messages' is an empty list"),
    ({"messages": [None, SAID]}, "messages[0] is null, not a message"),
    ({"messages": [{"role": None, "content": "hi"}, SAID]}, "messages[0] has no 'role'"),
    (
        {"messages": [{"role": "usr", "content": "hi"}, SAID]},
        "messages[0]: the role 'usr' is not known",
    ),
    ({"messages": [{"role": "user", "content": None}, SAID]}, "messages[0] has no 'content'"),
    ({"messages": [ASKED]}, "no token of it would be trained on"),
    ({"messages": [ASKED, SAID], "tools": "{"}, "'tools' is not JSON: "),
    ({"messages": [ASKED, SAID], "tools": "[5]"}, "'tools' is a list"),
    (
        {"messages": [ASKED, SAID], "tools": '[{"name": "f"}]'},
        "it has tools, but the chat template does not write them",
    ),
]


@pytest.mark.parametrize(("bad", "what"), PARQUET, ids=[each[1][:40] for each in PARQUET])
@pytest.mark.parametrize("place", [0, 7, 16])
def test_malformed_row_of_a_parquet_is_named_by_its_row(
    bad: Any, what: str, place: int
) -> None:
    """Row groups of five rows: the number is that in the file."""
    rows = [{"messages": [ASKED, SAID], "tools": None} for _ in range(20)]
    rows[place] = {"tools": None, **bad}
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    schema = pyarrow.schema([("messages", pyarrow.list_(message)), ("tools", pyarrow.string())])
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows, schema), "rows/a.parquet", row_group_size=5
    )
    (found,) = refused("rows/a.parquet")
    assert found.startswith(f"rows/a.parquet, row {place}: {what}"), found


CALLS = (
    "{{ tools|tojson }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{{ message.tool_calls|tojson if message.tool_calls }}{{ message.reasoning_content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def call(arguments: Any) -> dict[str, Any]:
    return {**SAID, "tool_calls": [{"name": "look", "arguments": arguments}]}


@pytest.mark.parametrize(
    "row",
    [
        chat(ASKED, {**SAID, "reasoning_content": "\ud83d"}),
        chat(ASKED, call({"city": "\ud83d"})),
        chat(ASKED, call({"\ud83d": 1})),
        chat(ASKED, call('{"city": "\\ud83d"}')),
        chat(ASKED, SAID, tools=[{"name": "look", "description": "\ud83d"}]),
        chat(ASKED, SAID, system="\ud83d"),
    ],
)
def test_half_a_surrogate_pair_is_named_wherever_a_template_writes_it(row: Any) -> None:
    Path("t.jinja").write_text(CALLS)
    Path("rows/a.jsonl").write_text(f"{json.dumps(chat(ASKED, SAID))}\n{json.dumps(row)}\n")
    (found,) = refused("rows/a.jsonl")
    assert found == "rows/a.jsonl, line 2: half of a surrogate pair in the text"


def test_value_that_json_does_not_have_is_no_text_of_a_call() -> None:
    """A renderer would write `<datetime>` for it. What no template writes does no harm."""
    Path("t.jinja").write_text(CALLS)
    day = datetime(2026, 1, 31)
    kept = chat({**ASKED, "timestamp": day}, {**SAID, "timestamp": day})
    rows = {"kept": [kept], "refused": [kept, chat(ASKED, call({"day": day}))]}
    for name, each in rows.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(each), f"rows/{name}.parquet")
    (found,) = refused("rows/refused.parquet")
    assert prepared("rows/kept.parquet").info.num_documents == 1
    assert found == "rows/refused.parquet, row 1: a value of the type datetime in the text"


def test_all_malformed_rows_are_counted_and_ten_are_named() -> None:
    lines = [line if isinstance(line, str) else json.dumps(line) for line, _ in CHATS]
    lines = [line for line in lines if len(line) < 1000]
    good = json.dumps(chat(ASKED, SAID))
    Path("rows/a.jsonl").write_text("\n".join([good, *lines]) + "\n")
    found = refused("rows/a.jsonl")
    named = [int(re.search(r", line (\d+): ", each)[1]) for each in found]  # type: ignore[index]
    assert (
        named == sorted(named)
        and named[0] == 2
        and len(named) == 10
        and named != list(range(2, 12))
    )
    assert f"(and {len(lines) - 10} more like these)" in found[-1]
    kept = stores.prepare(
        open_text(
            (
                source := Source(
                    "rows/a.jsonl", skip_bad_lines=True, labels=Labels(chat_template="t.jinja")
                )
            ),
            labeller_for(source, ByteTokenizer()),
        ),
        ByteTokenizer(),
        to=Path("kept"),
        skip_bad=True,
    )
    info = kept.open().info
    assert info is not None and (info.num_documents, info.num_skipped) == (1, len(lines))
