"""`threefold data show` and labelled stores: what is learnt is what the store holds, shown in text and as JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from threefold.commands.data import app
from threefold.commands.show_rows import histogram, marked, packed_row
from threefold.data.rows.known_rows import block_text
from threefold.data.rows.packing import Packing
from threefold.data.store.blocks import LOSS_MASK, Blocks, Change, FileBlocks
from threefold.data.store.open_source import open_store, rows_format
from threefold.data.store.store import TokenStore
from threefold.data.text.source import Labels, LossMask, Source
from threefold.data.tokens import ByteTokenizer, byte_backend
from threefold.errors import ConfigError, DataError
from threefold.run.sources import refuse_other_rows

TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
NAMED = ("--data.tokenizer", "bytes", "--data.chat_template", "t.jinja")
CHATS = ("--data.source", "c.jsonl", *NAMED)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve conversations and a chat template, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("t.jinja").write_text(TEMPLATE)
    write(
        "c.jsonl",
        [{"messages": turns(f"what is {i}?", str(i) * (1 + i % 3))} for i in range(12)],
    )
    return tmp_path


def turns(asked: str, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def write(name: str, rows: Sequence[Any]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(*arguments: str) -> str:
    """What a subcommand of `data` prints; its error is raised."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def shown(*arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data("show", *arguments, "--json").splitlines()]


def tokens_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without their texts, which a store does not have."""
    return [{key: value for key, value in row.items() if key != "texts"} for row in rows]


def test_text_has_markers_around_what_is_learnt() -> None:
    said = data("show", *CHATS, "--row", "4", "--ids").splitlines()
    assert said[:3] == [
        "row 4: 37 tokens, 3 trained on",
        "  | <|user|>what is 4?<|end|>",
        "  | <|assistant|>[[44<|end|>]]",
    ]
    assert said[3].startswith("  ids 60 124 117") and said[3].endswith("62 [52] [52] [256] 10")


def test_json_is_every_document_and_its_targets() -> None:
    rows = shown(*CHATS)
    assert [row["row"] for row in rows] == list(range(12))
    for number, row in enumerate(rows):
        learnt = [id for id, target in zip(row["ids"], row["loss_mask"], strict=True) if target]
        assert (
            bytes(learnt[:-1]).decode() == str(number) * (1 + number % 3) and learnt[-1] == 256
        )
        assert row["documents"] == [0] * len(row["ids"])
    assert (
        shown(*CHATS, "--row", "5") == [rows[5]] and shown(*CHATS, "--first", "2") == rows[:2]
    )


def test_store_records_what_is_learnt_and_shows_the_same() -> None:
    said = data("prepare", *CHATS, "--to", "store")
    info = TokenStore(Path("store/tokens")).info
    assert info is not None and str(info.loss_mask) == "chat (messages), trained on: assistant"
    assert f"  {info.mask_summary}\n" in said and re.search(
        r": 41 of 4\d\d tokens \(\d\.\d %\)$", info.mask_summary
    )
    assert shown("--data.source", "store", "--data.tokenizer", "bytes") == tokens_of(
        shown(*CHATS)
    )


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_changed_block_of_targets_is_named_with_the_rows_that_read_its_tokens(
    packing: str,
) -> None:
    data("prepare", *CHATS, "--to", "store")
    store = TokenStore("store/tokens")
    rows: Any = Packing(32, packing, document_mask=True).pack(store)
    size = -(-store.num_tokens // 8)
    blocks = Blocks(
        0, 256, {LOSS_MASK: FileBlocks(size, 0, bytes(16 * -(-size // 2)))}, block_bytes=2
    )
    before = [rows.rows(np.array([row]))["labels"][0] for row in range(rows.num_rows)]
    for block in (0, 3, -(-size // 2) - 1):
        bits = bytearray(Path("store/tokens.loss_mask").read_bytes())
        bits[2 * block : 2 * block + 2] = bytes(
            each ^ 255 for each in bits[2 * block : 2 * block + 2]
        )
        named = block_text(blocks, Change(LOSS_MASK, block, size), rows, first_row=100)
        kept = Path("store/tokens.loss_mask").read_bytes()
        Path("store/tokens.loss_mask").write_bytes(bits)
        after: Any = Packing(32, packing, document_mask=True).pack(TokenStore("store/tokens"))
        touched = [
            100 + row
            for row in range(rows.num_rows)
            if not np.array_equal(before[row], after.rows(np.array([row]))["labels"][0])
        ]
        Path("store/tokens.loss_mask").write_bytes(kept)
        found = [int(row) for row in re.findall(r"\d+", named.partition("read by row")[2])]
        assert touched and set(touched) <= set(found) and len(found) <= len(touched) + 1, named


@pytest.mark.parametrize("to", ["texts", "texts/", "./texts"])
def test_a_store_is_not_made_in_its_own_source(to: str) -> None:
    """From then on the folder would be the store, and texts that are added to it would not be read."""
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("some text")
    prepared = ("prepare", "--data.source", "texts", "--data.tokenizer", "bytes", "--to")
    with pytest.raises(
        ConfigError, match=rf"--to {to} is the source\n.*\n  fix: --to .*texts-tokens$"
    ):
        data(*prepared, to)
    assert [path.name for path in Path("texts").iterdir()] == ["a.txt"]
    assert "is made: " in data(*prepared, "texts-tokens")


def test_options_of_prepare_reach_the_store() -> None:
    write(
        "d.jsonl",
        [{"dialog": turns("a", "b"), "day": "x"}, {"dialog": turns("a", "b")[:1], "day": "x"}],
    )
    Path("dated.jinja").write_text("{{ strftime_now('%Y') }}" + TEMPLATE)
    options = (
        "--data.fields",
        "{messages: dialog}",
        "--data.train_on",
        "last",
        *("--data.skip_bad_lines", "true"),
    )
    dated = (
        "--data.chat_template",
        "dated.jinja",
        "--data.template_variables",
        "{date: 2026-01-31}",
        "--data.control_tokens",
        "ids",
    )
    data(
        "prepare",
        "--data.source",
        "d.jsonl",
        "--data.tokenizer",
        "bytes",
        *options,
        *dated,
        "--to",
        "store",
    )
    info = TokenStore(Path("store/tokens")).info
    assert info is not None and str(info.loss_mask) == "chat (dialog), trained on: last"
    assert (info.num_documents, info.num_skipped, info.num_loss_tokens) == (1, 1, 2)
    (row,) = shown("--data.source", "store", "--data.tokenizer", "bytes")
    assert bytes(row["ids"][:4]) == b"2026"


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        (Labels(train_on="last"), "data.train_on = last: "),
        (
            Labels(format="prompt_completion", train_on="last"),
            "data.format = prompt_completion, data.train_on = last",
        ),
    ],
)
def test_store_refuses_keys_that_contradict_it(labels: Labels, what: str) -> None:
    data("prepare", *CHATS, "--to", "store")
    for fits in (
        Labels(),
        Labels(format="chat", train_on="assistant", chat_template="t.jinja"),
    ):
        assert open_store(
            Source("store", labels=fits), tokenizer=ByteTokenizer(), cache=Path("cache")
        ).has_loss_mask
    with pytest.raises(DataError) as caught:
        open_store(
            Source("store", labels=labels), tokenizer=ByteTokenizer(), cache=Path("cache")
        )
    (problem,) = caught.value.problems
    assert problem.what.startswith(what)
    assert problem.what.endswith(
        "the token store store was made as chat (messages), trained on: assistant"
    )
    assert problem.expected.startswith(
        "what the store has recorded"
    ) and problem.fix.startswith("leave the keys out")


def test_store_of_texts_refuses_labels() -> None:
    write("texts.jsonl", [{"text": "some words"}])
    data(
        "prepare", "--data.source", "texts.jsonl", "--data.tokenizer", "bytes", "--to", "store"
    )
    for labels in (Labels(format="text"), Labels(train_on="all")):
        open_store(Source("store", labels=labels), tokenizer=None, cache=Path("cache"))
    with pytest.raises(
        DataError,
        match=r"data\.format = chat, data\.train_on = assistant: .* made as text, trained on: al",
    ):
        open_store(
            Source("store", labels=Labels(format="chat", train_on="assistant")),
            tokenizer=None,
            cache=Path("cache"),
        )


def test_what_is_learnt_of_other_columns_is_chosen_by_them() -> None:
    write("qa.jsonl", [{"question": "where?", "answer": "here"}])
    with pytest.raises(DataError, match=r"\{prompt: question, completion: answer\}"):
        open_store(
            Source("qa.jsonl", labels=Labels(train_on="completion")),
            tokenizer=ByteTokenizer(),
            cache=Path("cache").absolute(),
        )


def test_what_is_learnt_of_texts_is_not_chosen() -> None:
    Path("a.txt").write_text("some words")
    write("texts.jsonl", [{"text": "some words"}])
    for name in ("a.txt", "texts.jsonl"):
        with pytest.raises(
            DataError,
            match=r"train_on = last: .* is text, of which every token is trained on\n.*\n  fix: leave",
        ):
            open_store(
                Source(name, labels=Labels(train_on="last")),
                tokenizer=ByteTokenizer(),
                cache=Path("cache").absolute(),
            )
        data(
            "prepare",
            "--data.source",
            name,
            "--data.tokenizer",
            "bytes",
            "--data.train_on",
            "all",
            "--to",
            f"{name}-store",
        )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--data.chat_template", "t.jinja"), "data.chat_template = t.jinja"),
        (("--data.lost_texts", "count"), "data.lost_texts = count"),
        (("--data.template_variables", "{a: 1}"), "data.template_variables = {a: 1}"),
        (("--data.train_on", "assistant"), "data.train_on = assistant"),
        (("--data.format", "chat"), "data.format = chat"),
        (("--data.fields", "{messages: dialog}"), "data.fields = {messages: dialog}"),
    ],
)
@pytest.mark.parametrize("command", ["show", "prepare"])
def test_options_for_rows_with_labels_are_refused_for_texts(
    command: str, options: tuple[str, ...], named: str
) -> None:
    Path("words.txt").write_text("some words")
    to = ("--to", "store") if command == "prepare" else ()
    with pytest.raises(DataError) as caught:
        data(command, "--data.source", "words.txt", "--data.tokenizer", "bytes", *options, *to)
    (problem,) = caught.value.problems
    assert problem.what == f"{named}: words.txt is text, of which every token is trained on"
    assert (
        problem.expected
        == "rows with messages, or with prompt and completion: only they have labels"
    )
    assert problem.fix.startswith("leave data.") and not Path("store").exists()


@pytest.mark.parametrize(
    "row", [{"question": "a", "answer": "b"}, {"instruction": "a", "response": "b"}]
)
def test_template_for_rows_of_other_columns_is_answered_with_the_columns(
    row: dict[str, str],
) -> None:
    """The fix was {messages: NAME}, of conversations."""
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    asked = ("--data.source", "rows.jsonl", "--data.tokenizer", "bytes")
    with pytest.raises(DataError, match="has this field") as plain:
        data("show", *asked)
    with pytest.raises(DataError, match="has this field") as caught:
        data("show", *asked, "--data.chat_template", "t.jinja")
    assert caught.value.problems == plain.value.problems


def test_template_without_an_end_of_answers_is_warned_of_once() -> None:
    Path("open.jinja").write_text(TEMPLATE.replace("{{ eos_token }}", ""))
    named = (
        "--data.source",
        "c.jsonl",
        "--data.tokenizer",
        "bytes",
        "--data.chat_template",
        "open.jinja",
    )
    warning = (
        "warning: the chat template of open.jinja writes no end token after the "
        "assistant's turn, so the model does"
    )
    for arguments in (
        ("show", *named),
        ("prepare", *named, "--to", "store"),
        ("show", "--data.source", "store", *named[2:]),
    ):
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0 and result.stderr.count(warning) == 1, result.output
    info = TokenStore(Path("store/tokens")).info
    assert (
        info is not None
        and str(info.loss_mask)
        == "chat (messages), trained on: assistant, which has no end token"
    )
    open_store(
        Source("store", labels=Labels(train_on="assistant")),
        tokenizer=ByteTokenizer(),
        cache=Path("cache"),
    )
    assert "warning" not in CliRunner().invoke(app, ["show", *CHATS]).stderr


@pytest.mark.parametrize(
    "column", ["talk and no end", "talk, trained on: all", "x), which has no end token"]
)
def test_name_of_a_column_decides_nothing(column: str) -> None:
    """A store's loss mask is fields: no word in a column's name is taken for one of them."""
    write("named.jsonl", [{column: turns("a", "b")}])
    named = (
        "--data.source",
        "named.jsonl",
        *NAMED,
        "--data.fields",
        json.dumps({"messages": column}),
    )
    for arguments in (
        ["show", *named],
        ["prepare", *named, "--to", "store"],
        ["show", "--data.source", "store", *NAMED],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0 and "warning" not in result.stderr, result.output
    mask = TokenStore(Path("store/tokens")).loss_mask
    assert mask == LossMask("chat", (column,), "assistant", "trained", templated=True)
    with pytest.raises(
        DataError, match=r"data\.train_on = all: the token store store was made as chat"
    ):
        open_store(
            Source("store", labels=Labels(train_on="all")),
            tokenizer=ByteTokenizer(),
            cache=Path("cache"),
        )


def test_token_that_begins_a_text_is_refused_for_conversations() -> None:
    with pytest.raises(
        DataError,
        match=r"data\.bos = true: the rows are conversations\n  expected: a chat template",
    ):
        data("show", *CHATS, "--data.bos", "true")


def test_labels_that_tell_nothing_apart_are_refused() -> None:
    write("whole.jsonl", [{"prompt": "", "completion": "x"}])
    pair = ("--data.source", "whole.jsonl", "--data.tokenizer", "bytes")
    with pytest.raises(
        DataError,
        match=r"trained on: completion: all of its 2 tokens would be trained on\n  expected: prompts",
    ):
        data("prepare", *pair, "--to", "store")
    assert not Path("store/tokens.json").exists()
    data("prepare", *pair, "--data.train_on", "all", "--to", "store")
    write("none.jsonl", [{"messages": turns("a", "")[:1]}])
    with pytest.raises(
        DataError,
        match=r"trained on: assistant: none of 1 rows, 1 of them skipped would be trained on",
    ):
        data(
            "prepare",
            "--data.source",
            "none.jsonl",
            *NAMED,
            *("--data.skip_bad_lines", "true"),
            "--to",
            "other",
        )


def test_preferences_are_trained_as_the_answer_that_is_named() -> None:
    row = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    write("p.jsonl", [row])
    write("c.jsonl", [{"chosen": turns("q", "good"), "rejected": turns("q", "bad")}])
    for name, options in (
        (
            "p.jsonl",
            ("--data.format", "prompt_completion", "--data.fields", "{completion: chosen}"),
        ),
        (
            "c.jsonl",
            (
                "--data.format",
                "chat",
                "--data.fields",
                "{messages: chosen}",
                "--data.train_on",
                "last",
            ),
        ),
    ):
        with pytest.raises(
            ConfigError, match=r"has pairs of answers .*: rejected answers would be trained on"
        ) as caught:
            refuse_other_rows({"data.source": rows_format(Source(name))}, "next_token")
        assert options[3] in caught.value.problems[0].fix
        (shown_row,) = shown("--data.source", name, *NAMED, *options)
        learnt = [
            id
            for id, target in zip(shown_row["ids"], shown_row["loss_mask"], strict=True)
            if target
        ]
        assert bytes(learnt[:-1]) == b"good" and b"bad" not in bytes(
            id for id in shown_row["ids"] if id < 256
        )


@pytest.mark.parametrize("command", ["prepare", "show"])
@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (["--source", "c.jsonl"], "--data.source VALUE"),
        (["--tokenizer=bytes"], "--data.tokenizer VALUE"),
        (["--skip-bad-lines"], "--data.skip_bad_lines true"),
        (["--no-shuffle"], "--data.shuffle false"),
        (["--text-field", "body"], "--data.fields '{text: NAME}'"),
        (
            ["--skip-empty-targets"],
            "--data.skip_bad_lines true also counts rows with nothing to train on",
        ),
    ],
)
def test_flags_that_were_keys_are_refused_with_the_key(
    command: str, flags: list[str], fix: str
) -> None:
    to = ("--to", "store") if command == "prepare" else ()
    with pytest.raises(ConfigError) as caught:
        data(command, *flags, *to)
    (problem,) = caught.value.problems
    assert (
        problem.what
        == f"{flags[0].partition('=')[0]} is not an option of `threefold data {command}`"
    )
    assert (
        problem.expected.startswith("keys of the config, as every command takes them")
        and problem.fix == fix
    )


def test_config_file_names_the_source() -> None:
    Path("job.yaml").write_text(
        "data: {source: c.jsonl, tokenizer: bytes, chat_template: t.jinja}\n"
    )
    assert data("show", "job.yaml", "--row", "4") == data("show", *CHATS, "--row", "4")
    data("prepare", "job.yaml", "--to", "store")
    assert shown("--data.source", "store", "--data.tokenizer", "bytes") == tokens_of(
        shown(*CHATS)
    )
    Path("mixture.yaml").write_text("data: {mixture: {a: {source: c.jsonl, weight: 1}}}\n")
    mixture = ("mixture.yaml", *NAMED)
    with pytest.raises(
        ConfigError, match=r"data\.mixture = a with `threefold data show`"
    ) as error:
        data("show", *mixture)
    meant = shlex.split(error.value.problems[0].fix)
    assert data("show", *mixture, *meant) == data("show", *CHATS)


def test_config_that_a_run_takes_is_shown_and_prepared() -> None:
    """Without a tokenizer a model of random weights reads bytes."""
    write("words.jsonl", [{"text": "some words"}])
    Path("job.yaml").write_text("data: {source: words.jsonl}\n")
    assert "| [[some words" in data("show", "job.yaml")
    assert "11 tokens in 1 documents (bytes)" in data("prepare", "job.yaml", "--to", "store")
    with pytest.raises(ConfigError, match=r"data\.tokenizer is not given") as error:
        data("show", "--data.source", "words.jsonl")
    meant = shlex.split(re.split(r" {3}\(", error.value.problems[0].fix)[0])
    assert data("show", "--data.source", "words.jsonl", *meant) == data("show", "job.yaml")


def test_errors_of_requests() -> None:
    write("none.jsonl", [{"messages": turns("a", "")[:1]}])
    with pytest.raises(
        DataError, match=r"fix: correct the line, or --data\.skip_bad_lines true to count it"
    ):
        data("show", "--data.source", "none.jsonl", *NAMED)
    write("alpaca.jsonl", [{"instruction": "a", "input": "b", "output": "c"}])
    for name in ("c.jsonl", "alpaca.jsonl"):
        with pytest.raises(
            ConfigError, match=r"has no chat template\n.*\n  fix: --data.chat_template FILE"
        ):
            data("show", "--data.source", name, "--data.tokenizer", "bytes")
    with pytest.raises(ConfigError, match=r"there is no row 12"):
        data("show", *CHATS, "--row", "12")
    Path("empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"there is no row 0\n"):
        data("show", "--data.source", "empty.jsonl", "--data.tokenizer", "bytes")
    with pytest.raises(ConfigError, match=r"data\.source is not given"):
        data("show")
    with pytest.raises(ConfigError, match=r"run and --data\.source are both given"):
        data("show", "run", "--data.source", "c.jsonl", "--data.tokenizer", "bytes")
    meant = r"c\.jsonl is no run\n.*\n  fix: threefold data show --data\.source c\.jsonl --data\.tokenizer bytes$"
    with pytest.raises(ConfigError, match=meant):
        data("show", "c.jsonl", "--data.tokenizer", "bytes")
    with pytest.raises(ConfigError, match=r"c\.jsonl and --data\.source are both given"):
        data("show", "c.jsonl", "--data.source", "c.jsonl")
    with pytest.raises(ConfigError, match=r"data\.fields = 5 is not accepted"):
        data("show", *CHATS, "--data.fields", "5")


@pytest.mark.parametrize("packing", ["best_fit", "none", "concat"])
def test_packed_rows_learn_what_their_documents_do(packing: str) -> None:
    data("prepare", *CHATS, "--to", "store")
    rows = Packing(64, packing, document_mask=True).pack(TokenStore(Path("store/tokens")))
    learnt = sum(
        int(np.count_nonzero(packed_row(rows, number).loss_mask))
        for number in range(rows.num_rows)
    )
    # A document's first token is a label only where documents may cross, and none of a chat is learnt.
    labels = rows.rows(np.arange(rows.num_rows))["labels"]
    at_ends = int(np.count_nonzero(labels[:, -1] >= 0))
    assert learnt == int(np.count_nonzero(labels >= 0)) - at_ends
    assert learnt + at_ends == 41 or packing == "concat"


def test_escape_sequences_of_a_text_are_no_terminals() -> None:
    decode = byte_backend().decode
    text = b"a\x1b[2Jb"
    assert (
        marked(list(text), [False] * 3 + [True] * 3, lambda ids: decode(list(ids)))
        == r"a\x1b[[[2Jb]]"
    )


def test_a_terminal_has_colour_instead_of_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    decode = byte_backend().decode
    shown = marked(list(b"ab\nc"), [False, True, True, True], lambda ids: decode(list(ids)))
    green = "\x1b[32m\x1b[1m"
    assert shown == f"a{green}b\x1b[0m\n{green}c\x1b[0m"


def test_a_character_of_several_tokens_stays_one() -> None:
    ids = list("äö".encode())
    decode = byte_backend().decode
    assert marked(ids, [False, False, True, True], lambda ids: decode(list(ids))) == "ä[[ö]]"


def test_histogram_counts_rows_by_learnt_tokens() -> None:
    assert list(histogram([(10, 1), (10, 3), (20, 2)])) == [
        "the first 3 rows: 40 tokens, 6 trained on (15.0 %)",
        f"{'1':>22} trained on:     1 rows  {'#' * 20}",
        f"{'2 to 3':>22} trained on:     2 rows  {'#' * 40}",
    ]
