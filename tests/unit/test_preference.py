"""Rows with two answers: from their columns to a store of pairs, and what is wrong with one named by file and line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from threefold.commands.data import app
from threefold.data.chat.formats import Columns, Example, RowError, columns_of
from threefold.data.chat.labeller import labeller_for
from threefold.data.chat.preference import pair_of
from threefold.data.store import parts as store_parts
from threefold.data.store.open_source import open_store, open_text, rows_format
from threefold.data.store.prepare import prepare
from threefold.data.store.store import TokenStore
from threefold.data.text import rows as text_rows
from threefold.data.text.source import Labels, Source
from threefold.data.tokens import ByteTokenizer
from threefold.errors import ConfigError, DataError
from threefold.run.sources import refuse_other_rows

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
OTHER = {"role": "assistant", "content": "no"}
TEXTS = {"prompt": "q:", "chosen": "good", "rejected": "bad"}
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
END = 256


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("t.jinja").write_text(TEMPLATE)
    return tmp_path


def write(name: str, rows: Sequence[Any]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def made(
    rows: Sequence[Any],
    to: str = "store",
    *,
    skip_bad: bool = False,
    workers: int | None = None,
    **labels: Any,
) -> TokenStore:
    """A store of these rows, by the byte tokenizer."""
    write("p.jsonl", rows)
    source = Source(
        "p.jsonl", skip_bad_lines=skip_bad, labels=Labels(chat_template="t.jinja", **labels)
    )
    text = open_text(source, labeller_for(source, ByteTokenizer()))
    return prepare(
        text, ByteTokenizer(), to=Path(to), skip_bad=skip_bad, num_workers=workers
    ).open()


def documents(store: TokenStore) -> list[tuple[bytes, bytes]]:
    """(what is not learnt, what is learnt without its end token) of each document."""
    found, begin = [], 0
    for end in store.document_ends.tolist():
        ids, learnt = store.read(begin, end), store.trained_on(begin, end)
        said = ids[learnt]
        assert said[-1] == END and not learnt[: np.argmax(learnt)].any()
        found.append(
            (bytes(ids[~learnt][ids[~learnt] < END].tolist()), bytes(said[:-1].tolist()))
        )
        begin = end
    return found


def data(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        {"prompt": "hi", "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        {"prompt": [USER], "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        {"prompt": [USER], "chosen": [USER, ASSISTANT], "rejected": [OTHER]},
        {"prompt": None, "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
    ],
)
def test_both_answers_follow_one_prompt(row: dict[str, Any]) -> None:
    expected = [Example((USER, ASSISTANT), num_prompt=1), Example((USER, OTHER), num_prompt=1)]
    assert pair_of(row, columns_of(list(row))) == expected


def test_sharegpt_and_other_names_of_columns() -> None:
    asked, said, other = (
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "hello"},
        {"from": "gpt", "value": "no"},
    )
    columns = columns_of(
        ["good", "bad", "question"],
        fields={"chosen": "good", "rejected": "bad", "prompt": "question"},
    )
    row = {"question": "hi", "good": [asked, said], "bad": [asked, other]}
    assert [each.messages for each in pair_of(row, columns)] == [
        (USER, ASSISTANT),
        (USER, OTHER),
    ]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue", "The sky is black", "The sky is"),
        ("The sky", "The sky is", "The"),
        ("a\n\nb", "a\n\nc", "a"),
        ("ab", "ac", ""),
    ],
)
def test_prompt_of_two_texts_ends_before_white_space(
    chosen: str, rejected: str, prompt: str
) -> None:
    pair = pair_of({"chosen": chosen, "rejected": rejected}, columns_of(["chosen", "rejected"]))
    assert [each.texts for each in pair] == [
        (prompt, text[len(prompt) :]) for text in (chosen, rejected)
    ]


def test_prompt_of_two_conversations_is_what_they_have_in_common() -> None:
    """As TRL: the turns after it are the answer, however many; never none."""
    more = [USER, ASSISTANT, USER, ASSISTANT]
    for chosen, rejected, expected in (
        ([USER, ASSISTANT, USER, ASSISTANT], [USER, ASSISTANT, USER, OTHER], 3),
        ([USER, ASSISTANT, USER, ASSISTANT], [USER, OTHER, USER, OTHER], 1),
        (more, more[:2], 1),
    ):
        pair = pair_of(
            {"chosen": chosen, "rejected": rejected}, columns_of(["chosen", "rejected"])
        )
        assert [each.num_prompt for each in pair] == [expected] * 2
        assert [list(each.messages) for each in pair] == [chosen, rejected]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(*[st.text("ab q", min_size=1, max_size=6)] * 3), min_size=1, max_size=12
    )
)
def test_store_is_pairs_in_the_order_of_the_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any]
) -> None:
    """Against the rows themselves: documents 2k and 2k + 1 are the two answers of row k, and only they are learnt."""
    rows = [row for row in rows if row[1] != row[2]] or [("p", "a", "b")]
    to = tmp_path_factory.mktemp("pairs")
    store = made(
        [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows], str(to)
    )
    assert store.has_pairs and store.info is not None and store.info.pairs is True
    expected = [
        (prompt.encode(), answer.encode()) for prompt, *answers in rows for answer in answers
    ]
    assert documents(store) == expected
    assert store.info.num_loss_tokens == sum(len(answer) + 1 for _, answer in expected)


def test_chats_learn_the_turns_after_the_prompt() -> None:
    store = made([{"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}])
    assert (
        store.info is not None
        and str(store.info.loss_mask) == "preference (chosen, rejected), trained on: completion"
    )
    shown = [
        json.loads(line)
        for line in data(
            "show", "--data.source", "store", "--data.tokenizer", "bytes", "--json"
        ).splitlines()
    ]
    ids, targets = np.array(shown[0]["ids"]), np.array(shown[0]["loss_mask"])
    # As of a completion: all that follows the prompt.
    assert ids[targets].tolist() == [*b"hello", END, 10, *b"no", END, 10]
    prompt = [*b"<|user|>hi", END, *b"\n<|assistant|>"]
    assert ids[~targets].tolist() == prompt * 2


def test_pairs_are_whole_in_any_number_of_processes_and_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces and parts of a few bytes, and batches that end inside a pair, give the same store."""
    rows = [
        {"prompt": f"{number}:", "chosen": "a" * (number % 7 + 1), "rejected": "b"}
        for number in range(60)
    ]
    whole = made(rows)
    monkeypatch.setattr(text_rows, "_PIECE_BYTES", 100)
    monkeypatch.setattr(store_parts, "PART_BYTES", 150)
    monkeypatch.setattr(store_parts, "_BATCH_DOCUMENTS", 3)
    for workers in (1, 2):
        cut = made(rows, f"cut-{workers}", workers=workers)
        assert cut.fingerprint == whole.fingerprint and documents(cut) == documents(whole)


MALFORMED: list[tuple[Any, str]] = [
    ({"prompt": "q:", "rejected": "b"}, "'chosen' is missing or null"),
    ({"prompt": "q:", "chosen": "a", "rejected": None}, "'rejected' is missing or null"),
    (
        {"prompt": "q:", "chosen": "a", "rejected": "a"},
        "'chosen' and 'rejected' are the same, token for token",
    ),
    (
        {"chosen": [USER, OTHER], "rejected": [USER, OTHER]},
        "'chosen' and 'rejected' are the same, token for token",
    ),
    (
        {"prompt": "q:", "chosen": ["a"], "rejected": ["b"]},
        "'chosen': the prompt is text and the completion a list",
    ),
    (
        {"prompt": [USER], "chosen": ["a"], "rejected": ["b"]},
        "'chosen': completion[0] is text, not a message",
    ),
    (
        {"prompt": "q:", "chosen": "a", "rejected": [OTHER]},
        "'chosen' is text and 'rejected' is a list",
    ),
    ({"prompt": "q:", "chosen": 5, "rejected": "b"}, "'chosen' is a number"),
    (
        {"prompt": "q:", "chosen": "a", "rejected": {"role": "assistant"}},
        "'rejected' is an object",
    ),
    (
        {"prompt": True, "chosen": "a", "rejected": "b"},
        "'chosen': the prompt is true or false and the completion text",
    ),
    (
        {"prompt": [], "chosen": [OTHER], "rejected": [ASSISTANT]},
        "'chosen': 'prompt' is an empty list",
    ),
    (
        {"prompt": [USER], "chosen": [{**ASSISTANT, "role": "asistant"}], "rejected": [OTHER]},
        "'chosen': completion[0]: the role",
    ),
    (
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{**USER, "content": "x"}]},
        "'rejected': it begins with a turn of the user",
    ),
    (
        {"prompt": [USER], "chosen": [{"role": "assistant"}], "rejected": [OTHER]},
        "'chosen': completion[0] has no 'content'",
    ),
    ({"prompt": "q:", "chosen": "", "rejected": "b"}, "'chosen': it is empty"),
    ({"prompt": "q:", "chosen": "", "rejected": ""}, "'chosen': it is empty"),
    ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": []}, "'rejected': it is empty"),
    (
        {"prompt": [USER], "chosen": [USER, ASSISTANT], "rejected": [USER]},
        "'rejected': it is empty",
    ),
    (
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{**OTHER, "content": ""}]},
        "'rejected': it is empty",
    ),
    (
        {"chosen": [USER, ASSISTANT], "rejected": [{**USER, "content": "bye"}, OTHER]},
        "there is no prompt, and 'chosen' and",
    ),
    (
        {
            "prompt": [USER],
            "chosen": [{**USER, "content": "bye"}, ASSISTANT],
            "rejected": [OTHER],
        },
        "'chosen': it begins with a",
    ),
    ({"chosen": [USER], "rejected": [USER]}, "there is no prompt, and 'chosen' and"),
    ({"chosen": [], "rejected": [USER]}, "there is no prompt, and 'chosen' and"),
    ({"chosen": "a", "rejected": "b"}, "nothing comes before the answers"),
    (
        {"prompt": "q:", "chosen": "a", "rejected": "b", "system": "s"},
        "'chosen': 'system' is text, beside text",
    ),
    (["a", "b"], "a list, not an object"),
    (None, "null, not an object"),
]


@pytest.mark.parametrize(
    ("row", "what"), MALFORMED, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_malformed_pair_is_named_by_file_and_line(row: Any, what: str) -> None:
    with pytest.raises(DataError) as caught:
        made([TEXTS, row, TEXTS], format="preference")
    (problem,) = caught.value.problems
    assert problem.what.split("p.jsonl, ", 1)[1].startswith(f"line 2: {what}"), problem.what
    assert problem.expected and problem.fix


def test_bad_pairs_are_dropped_whole_and_counted_once() -> None:
    bad = [row for row, _ in MALFORMED]
    store = made([TEXTS, *bad, {**TEXTS, "prompt": "p:"}], skip_bad=True)
    assert documents(store) == [
        (b"q:", b"good"),
        (b"q:", b"bad"),
        (b"p:", b"good"),
        (b"p:", b"bad"),
    ]
    assert store.info is not None and store.info.num_skipped == len(bad)


def test_pairs_without_targets_are_counted_as_pairs() -> None:
    empty = [
        {**TEXTS, "rejected": ""},
        {**TEXTS, "chosen": "bad"},
        {"chosen": "a b", "rejected": "a b"},
    ]
    with pytest.raises(DataError, match=r"--data\.skip_bad_lines true to count it instead"):
        made([TEXTS, *empty])
    store = made([TEXTS, *empty], skip_bad=True)
    assert store.info is not None and (store.info.num_documents, store.info.num_skipped) == (
        2,
        3,
    )


def test_prompt_that_ends_inside_a_token_is_refused(tmp_path: Path) -> None:
    """The answers would lose what lies across the border, each something else."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from threefold.data.tokens import load_tokenizer

    words = ["q:", " ", " yes", " no", "yes", "no", "</s>"]
    backend = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=" ")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+:?| "), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(
        tmp_path / "t"
    )
    tokenizer = load_tokenizer(str(tmp_path / "t"))
    for number, (prompt, chosen, rejected, refused) in enumerate(
        (("q:", " yes", " no", False), ("q: ", "yes", "no", False), ("q: y", "es", "o", True))
    ):
        write("p.jsonl", [{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
        source = Source("p.jsonl")
        text = open_text(source, labeller_for(source, tokenizer))
        if not refused:
            assert prepare(text, tokenizer, to=Path(f"fits-{number}")).info.num_loss_tokens == 4
            continue
        with pytest.raises(
            DataError,
            match=r"line 1: the prompt has different tokens before the two answers: 2 before",
        ):
            prepare(text, tokenizer, to=Path("split"))


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_only_answers_are_learnt(train_on: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"data.train_on = '{train_on}' with rows of the format preference"
    ):
        made([TEXTS], train_on=train_on)
    assert made([TEXTS], train_on="completion").has_pairs


def edited(**changes: Any) -> None:
    path = Path("store/tokens.json")
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(
        json.dumps({name: value for name, value in values.items() if value != "gone"})
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"pairs": "gone"},
        {"pairs": False},
        {"pairs": "true"},
        {"pairs": 1},
        {"loss_mask": {"format": "chat", "columns": ["messages"], "train_on": "assistant"}},
        {"loss_mask": "gone"},
    ],
)
def test_store_that_is_half_of_pairs_is_refused(changes: dict[str, Any]) -> None:
    made([TEXTS])
    edited(**changes)
    with pytest.raises(
        DataError, match=r"tokens\.json describes .* documents with the loss mask"
    ):
        TokenStore(Path("store/tokens"))


def test_misspelt_key_of_a_store_is_refused() -> None:
    made([TEXTS])
    edited(pairs="gone", pair=True)
    with pytest.raises(DataError, match=r"unexpected keyword argument 'pair'"):
        TokenStore(Path("store/tokens"))


def test_store_without_its_json_is_not_read_as_text() -> None:
    made([TEXTS])
    edited(pair=True)
    with pytest.raises(DataError, match=r"\n  fix: prepare it again"):
        TokenStore(Path("store/tokens"))
    Path("store/tokens.json").unlink()
    with pytest.raises(
        DataError, match=r"tokens\.json does not exist, but tokens\.loss_mask does"
    ):
        TokenStore(Path("store/tokens"))


def test_odd_number_of_documents_is_refused() -> None:
    from threefold.data.store.writer import StoreWriter

    info = made([TEXTS, TEXTS]).info
    assert info is not None
    with StoreWriter("odd", dtype=np.dtype("<u2")) as writer:
        for _ in range(3):
            writer.add_block(
                np.arange(4), np.array([4], np.int32), np.array([False, True, True, True])
            )
        writer.finish(
            lambda w: type(info)(
                **{**vars(info), "num_tokens": w.num_tokens, "num_documents": 3}
            )
        )
    with pytest.raises(
        DataError, match=r"describes documents in pairs \(pairs: True\), in 3 documents"
    ):
        TokenStore("odd")


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".loss_mask"])
def test_store_of_pairs_edited_by_a_byte_is_named(suffix: str) -> None:
    from threefold.data.rows.packing import Packing, open_rows

    made([TEXTS, TEXTS])
    packing = Packing(64, None, document_mask=True)
    source = Source("store")
    open_rows(source, packing, tokenizer=None, cache=Path("cache"))
    path = Path(f"store/tokens{suffix}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"tokens\{suffix} "):
        open_rows(source, packing, tokenizer=None, cache=Path("cache"))


def test_part_with_half_a_pair_is_made_again() -> None:
    source = Source("p.jsonl")
    write("p.jsonl", [TEXTS])
    text = open_text(source, labeller_for(source, ByteTokenizer()))
    Path("parts").mkdir()
    maker = store_parts.PartMaker(text, ByteTokenizer(), Path("parts"), False)
    (part,) = store_parts.plan_parts(text.pieces)
    assert maker.make(part) == maker.finished(part)
    path = Path("parts/00000.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_documents": 1}))
    (Path("parts/00000.len")).write_bytes(Path("parts/00000.len").read_bytes()[:4])
    assert maker.finished(part) is None


def test_rows_are_of_one_kind_and_those_of_the_objective() -> None:
    refuse_other_rows({"data.source": "chat", "eval.source": "text"}, "next_token")
    with pytest.raises(
        ConfigError,
        match=r"data\.mixture\.b has pairs .* and data\.mixture\.a rows of the format chat",
    ):
        refuse_other_rows(
            {"data.mixture.a": "chat", "data.mixture.b": "preference"}, "next_token"
        )
    with pytest.raises(
        ConfigError, match=r"eval\.source has pairs .* and data\.source rows of the format text"
    ):
        refuse_other_rows({"data.source": "text", "eval.source": "preference"}, "next_token")
    with pytest.raises(
        ConfigError, match=r"data\.source has pairs .*: rejected answers would be trained on"
    ):
        refuse_other_rows(
            {"data.source": "preference", "eval.source": "preference"}, "next_token"
        )
    refuse_other_rows({"data.source": "preference", "eval.source": "preference"}, "dpo")
    with pytest.raises(
        ConfigError, match=r"data\.source has pairs .* and eval\.source rows of the format text"
    ):
        refuse_other_rows({"data.source": "preference", "eval.source": "text"}, "dpo")
    with pytest.raises(
        ConfigError,
        match=r"train\.objective = dpo, but data\.source has rows of the format chat\n",
    ):
        refuse_other_rows({"data.source": "chat"}, "dpo")
    made([TEXTS])
    assert [rows_format(Source(name)) for name in ("p.jsonl", "store")] == ["preference"] * 2
    with pytest.raises(DataError, match=r"data\.format = chat: .* made as preference"):
        open_store(
            Source("store", labels=Labels(format="chat")), tokenizer=None, cache=Path("cache")
        )


def test_pairs_beside_other_rows_in_a_list_are_refused() -> None:
    write("p.jsonl", [TEXTS])
    write("q.jsonl", [{"prompt": "q:", "completion": "a"}])
    source = Source(("p.jsonl", "q.jsonl"))
    with pytest.raises(DataError, match=r"different kinds: preference .*; prompt_completion"):
        open_text(source, labeller_for(source, ByteTokenizer()))


def test_show_marks_both_sides() -> None:
    write("p.jsonl", [TEXTS, {**TEXTS, "prompt": "p:"}])
    options = ("--data.tokenizer", "bytes")
    said = data("show", "--data.source", "p.jsonl", *options, "--row", "1").splitlines()
    assert said == [
        "row 1: 13 tokens, 9 trained on",
        "  document 0, chosen: 7 tokens, 5 trained on",
        "  | p:[[good<|end|>]]",
        "  document 1, rejected: 6 tokens, 4 trained on",
        "  | p:[[bad<|end|>]]",
    ]
    lines = data("show", "--data.source", "p.jsonl", *options, "--json").splitlines()
    first = json.loads(lines[0])
    assert len(lines) == 2 and first["sides"] == ["chosen", "rejected"]
    assert first["documents"] == [0] * 7 + [1] * 6
    assert [
        id for id, learnt in zip(first["ids"], first["loss_mask"], strict=True) if learnt
    ] == [*b"good", END, *b"bad", END]
    prepared = data("prepare", "--data.source", "p.jsonl", *options, "--to", "store")
    assert "2 pairs (bytes)" in prepared
    assert prepared.endswith(
        "\nuse it: threefold train --train.objective dpo --data.source store --data.tokenizer bytes\n"
    )
    again = data("prepare", "--data.source", "p.jsonl", *options, "--to", "a store")
    assert " --data.source 'a store' --data.tokenizer bytes\n" in again
    assert data("show", "--data.source", "store", *options, "--json").splitlines() == lines
    with pytest.raises(ConfigError, match=r"there is no row 2"):
        data("show", "--data.source", "store", *options, "--row", "2")


def test_row_error_names_what_was_expected() -> None:
    with pytest.raises(RowError) as caught:
        pair_of(
            {"prompt": "q", "chosen": "a"},
            Columns("preference", ("chosen", "rejected", "prompt")),
        )
    assert caught.value.expected == "'rejected' in every row"
