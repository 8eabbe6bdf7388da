"""A row has one form, whatever file it came in: equal tokens and loss masks from .jsonl, .parquet and `datasets`."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.data.chat.formats import RowError, columns_of, example_of
from threefold.data.chat.labeller import labeller_for
from threefold.data.chat.template import ChatTemplate
from threefold.data.store import in_memory
from threefold.data.store.open_source import open_text
from threefold.data.text.source import Labelled, Labels, ReadLog, Source
from threefold.data.tokens import ByteTokenizer
from threefold.errors import DataError

TEMPLATE = (
    "{%- if tools -%}<tools>{{ tools | tojson }}{{ eos_token }}{%- endif -%}"
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{%- endfor -%}"
    "{{ eos_token }}\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
# Arrow has one order of keys and one type of a value for all rows; what is generated keeps to them.
PROPERTIES = ("city", "ticker", "unit")
KINDS: dict[str, Any] = {
    "city": st.text("abc", max_size=4),
    "ticker": st.integers(0, 9),
    "unit": st.booleans(),
}
arguments = st.fixed_dictionaries({}, optional=KINDS).map(
    lambda drawn: {name: drawn[name] for name in PROPERTIES if name in drawn}
)


@st.composite
def functions(draw: st.DrawFn) -> dict[str, Any]:
    names = sorted(draw(st.sets(st.sampled_from(PROPERTIES), min_size=1)), key=PROPERTIES.index)
    about = {"description": "d"} if draw(st.booleans()) else {}
    properties = {name: {"type": "string", **about} for name in names}
    parameters = {"type": "object", "properties": properties, "required": names}
    return {
        "type": "function",
        "function": {"name": draw(st.sampled_from("fgh")), "parameters": parameters},
    }


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    def call() -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": draw(st.sampled_from("fgh")), "arguments": draw(arguments)},
        }

    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(
            {"role": "user", "content": draw(st.text("xyz ", min_size=1, max_size=8))}
        )
        if draw(st.booleans()):
            messages.append({"role": "assistant", "content": "", "tool_calls": [call()]})
            messages.append({"role": "tool", "content": "result", "name": "f"})
        weight = {"weight": draw(st.integers(0, 1))} if draw(st.booleans()) else {}
        messages.append(
            {
                "role": "assistant",
                "content": draw(st.text("pqr", min_size=1, max_size=8)),
                **weight,
            }
        )
    messages.append({"role": "assistant", "content": "last"})
    # That all of a row is null or empty is no form of it that Parquet knows.
    return {"messages": messages, "tools": draw(st.lists(functions(), min_size=1, max_size=2))}


# Every key, so that Arrow knows its type.
COMPLETE = {
    "messages": [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "arguments": {"city": "Oslo", "ticker": 1, "unit": True},
                    },
                }
            ],
        },
        {"role": "tool", "content": "rain", "name": "f"},
        {"role": "assistant", "content": "it rains", "weight": 1},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string", "description": "d"} for name in PROPERTIES
                    },
                    "required": list(PROPERTIES),
                },
            },
        }
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


def documents(name: str, folder: Path, **labels: Any) -> list[tuple[list[int], list[bool]]]:
    """(ids, whether each is trained on) of every row of a source."""
    source = Source(name, labels=Labels(chat_template=str(folder / "chat.jinja"), **labels))
    text = open_text(source, labeller_for(source, ByteTokenizer()))
    log = ReadLog()
    read = [each for piece in text.pieces for each in text.read(piece, log)]
    if log.problems:
        raise DataError.of(log.problems)
    return [
        (each.ids.tolist(), each.loss_mask.tolist())
        for each in read
        if isinstance(each, Labelled)
    ]


def trained_texts(found: list[tuple[list[int], list[bool]]]) -> list[str]:
    return [
        bytes(id for id, bit in zip(*each, strict=True) if bit and id < 256).decode()
        for each in found
    ]


def write(path: Path, written: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return str(path)


def saved(path: Path, dataset: Any) -> str:
    shutil.rmtree(path, ignore_errors=True)
    dataset.save_to_disk(str(path))
    return str(path)


@settings(max_examples=12, deadline=None)
@given(drawn=st.lists(rows(), min_size=1, max_size=4))
def test_tokens_and_masks_are_equal_from_every_kind_of_file(
    folder: Path, drawn: list[dict[str, Any]]
) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    written = [COMPLETE, *drawn]
    expected = documents(write(folder / "rows.jsonl", written), folder)
    assert len(expected) == len(written)
    assert "null" not in "".join(
        bytes(id for id in ids if id < 256).decode() for ids, _ in expected
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), folder / "rows.parquet")
    assert documents(str(folder / "rows.parquet"), folder) == expected
    dataset = datasets.Dataset.from_list(written)
    assert documents(saved(folder / "saved", dataset), folder) == expected
    # As `threefold.train(dataset=...)` takes them.
    for given_rows in (written, dataset):
        place = in_memory.written(
            given_rows, name="dataset", cache=folder / "cache", tokenizer=ByteTokenizer
        )
        assert documents(str(place), folder) == expected
    shutil.rmtree(folder / "hub", ignore_errors=True)
    (folder / "hub").mkdir()
    shutil.copy(folder / "rows.parquet", folder / "hub" / "train.parquet")
    assert documents(f"hf:{folder}/hub", folder) == expected


@pytest.mark.parametrize("name", ["a.ndjson", "a.jl", "a.ndjson.gz", "a.JSONL"])
def test_lines_under_other_names_are_lines(folder: Path, tmp_path: Path, name: str) -> None:
    expected = documents(write(folder / "rows.jsonl", [COMPLETE]), folder)
    content = (folder / "rows.jsonl").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert (
        documents(str(tmp_path), folder) == documents(str(tmp_path / name), folder) == expected
    )


def test_arguments_as_text_are_those_as_an_object(folder: Path) -> None:
    """OpenAI has them as JSON in a text, which a template would write as a text in quotes."""
    expected = documents(write(folder / "object.jsonl", [COMPLETE]), folder)
    texts = json.loads(json.dumps(COMPLETE))
    (call,) = texts["messages"][1]["tool_calls"]
    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert documents(write(folder / "text.jsonl", [texts]), folder) == expected
    call["function"]["arguments"] = '{"city": '
    with pytest.raises(
        DataError,
        match=r"text.jsonl, line 1: messages\[1\]: the arguments of a call are not JSON",
    ):
        documents(write(folder / "text.jsonl", [texts]), folder)


def test_template_that_takes_arguments_as_text_gets_text(folder: Path) -> None:
    source = (
        "{%- for message in messages -%}<{{ message.role }}>{{ message.content or '' }}"
        "{%- for call in message.tool_calls or [] -%}{{ '[' + call.function.arguments + ']' }}{%- endfor -%}"
        "<end>{%- endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
    )
    example = example_of(COMPLETE, columns_of(["messages"]))
    shown = ChatTemplate(source, {}, {}).render(example.messages)
    assert '<assistant>[{"city": "Oslo", "ticker": 1, "unit": true}]<end>' in shown


def test_columns_that_datasets_keeps_as_json_are_read(folder: Path) -> None:
    """Objects of several forms, which `load_dataset` of a .jsonl makes texts of JSON of."""
    import datasets

    other = json.loads(
        json.dumps(COMPLETE)
        .replace('"city"', '"place"')
        .replace('"ticker": 1', '"ticker": "one"')
    )
    other["messages"][0]["name"] = ["me"]
    name = write(folder / "unlike.jsonl", [COMPLETE, other])
    expected = documents(name, folder)
    dataset = datasets.load_dataset(
        "json", data_files=name, split="train", cache_dir=str(folder / "cache")
    )
    assert "Json" in str(dataset.features)
    assert documents(saved(folder / "json", dataset), folder) == expected
    dataset.add_column("id", [1, 2]).to_parquet(str(folder / "json.parquet"))
    assert documents(str(folder / "json.parquet"), folder) == expected


def test_keys_that_arrow_fills_with_null_are_not_trained_on(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    def row(arguments: dict[str, str]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    written = [row({"city": "Oslo"}), row({"ticker": "ACME"})]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), folder / "calls.parquet")
    texts = trained_texts(documents(str(folder / "calls.parquet"), folder))
    assert ['[f {"city": "Oslo"}]' in texts[0], '[f {"ticker": "ACME"}]' in texts[1]] == [
        True,
        True,
    ]


def test_pair_in_parquet_finds_the_prompt_that_its_answers_repeat(folder: Path) -> None:
    """The messages of the answers have a key that those of the prompt have not: a null of Arrow's is no difference."""
    import pyarrow
    import pyarrow.parquet

    good, bad = (
        {"role": "assistant", "content": text, "name": "me"} for text in ("good", "bad")
    )
    written = [{"prompt": [USER], "chosen": [USER, good], "rejected": [USER, bad]}]
    expected = documents(write(folder / "pairs.jsonl", written), folder)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), folder / "pairs.parquet")
    assert documents(str(folder / "pairs.parquet"), folder) == expected
    assert [text.strip() for text in trained_texts(expected)] == ["good", "bad"]


USER = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "GOOD"}, {"role": "assistant", "content": "BAD"}


@pytest.mark.parametrize(
    "key", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 1, "train": False}]
)
def test_message_of_no_weight_is_not_trained_on(folder: Path, key: dict[str, Any]) -> None:
    talk = [USER, {**BAD, **key}, USER, {**GOOD, "weight": 1, "train": True}]
    name = write(folder / "weights.jsonl", [{"messages": talk}])
    ((ids, mask),) = documents(name, folder)
    ((plain, _),) = documents(
        write(folder / "plain.jsonl", [{"messages": [USER, BAD, USER, GOOD]}]), folder
    )
    assert ids == plain  # it is read all the same
    assert trained_texts([(ids, mask)]) == ["GOOD"]
    (folder / "marked").mkdir(exist_ok=True)
    text = "{%- for m in messages -%}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    text += "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor -%}"
    (folder / "marked/chat.jinja").write_text(text)
    assert trained_texts(documents(name, folder / "marked")) == ["GOOD"]


@pytest.mark.parametrize("train_on", ["all", "completion"])
def test_message_of_no_weight_inside_what_is_trained_as_a_whole_is_refused(
    folder: Path, train_on: str
) -> None:
    written = {"prompt": [USER], "completion": [{**BAD, "weight": 0}, USER, GOOD]}
    name = write(folder / "whole.jsonl", [written])
    with pytest.raises(
        DataError, match=r"messages\[1\] is not to be trained on \(weight: 0 or train: false\)"
    ):
        documents(name, folder, train_on=train_on)
    asked = {"prompt": [USER, {**BAD, "weight": 0}, USER], "completion": [GOOD]}
    if train_on == "completion":  # of the prompt nothing is trained on anyway
        assert (
            trained_texts(documents(write(folder / "asked.jsonl", [asked]), folder))[0].strip()
            == "GOOD"
        )


@pytest.mark.parametrize("key", [{"weight": 0.5}, {"weight": "0"}, {"train": "no"}])
def test_other_weights_are_refused_by_name(key: dict[str, Any]) -> None:
    (name,) = key
    with pytest.raises(RowError, match=rf"messages\[1\]: '{name}' is ") as raised:
        example_of({"messages": [USER, {**GOOD, **key}]}, columns_of(["messages"]))
    assert raised.value.expected.startswith(f"'{name}' as 0 or 1")
