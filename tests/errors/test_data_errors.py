"""The texts of the errors about data: what is wrong, what was expected, and the text to paste."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import httpx
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Tokenizer, models

from threefold.config.yaml_text import read_yaml
from threefold.data.rows.best_fit import PaddedRows
from threefold.data.rows.packing import Packing, open_rows
from threefold.data.store import parts
from threefold.data.store.in_memory import written
from threefold.data.store.open_source import open_store, open_text
from threefold.data.store.prepare import prepare
from threefold.data.store.store import TokenStore
from threefold.data.store.writer import StoreWriter
from threefold.data.text.listing import KINDS
from threefold.data.text.source import Labels, Source
from threefold.data.tokens import ByteTokenizer, load_tokenizer
from threefold.errors import (
    EXIT_WRONG_REQUEST,
    ConfigError,
    DataError,
    RunError,
    ThreefoldError,
    first_line,
)

BYTES = ByteTokenizer()
SKIP = "--data.skip_bad_lines true to count it instead"
CORRECT = f"correct the line, or {SKIP}"
REMAKE = "threefold data prepare --data.source TEXT --data.tokenizer TOKENIZER --to DIR   (makes a new store)"
COPY = f"copy the .bin and .idx again from their origin, or\n       {REMAKE}"


@pytest.fixture(autouse=True)
def folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty working folder, without a way to the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets")
    )
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def said(
    act: Callable[[], Any], kind: type[ThreefoldError] = DataError
) -> list[tuple[str, str, str]]:
    """The problems of the error that `act` raises, which asks for exit code 2 unless it is a RunError."""
    with pytest.raises(kind) as caught:
        act()
    assert kind is RunError or caught.value.exit_code == EXIT_WRONG_REQUEST
    return [(problem.what, problem.expected, problem.fix) for problem in caught.value.problems]


def read(source: str | tuple[str, ...], **options: Any) -> Callable[[], Any]:
    labels = Labels(fields={"text": options.pop("text_field", "text")})
    return lambda: prepare(
        open_text(Source(source, labels=labels, **options)), BYTES, to=Path("prepared")
    )


def rows(source: str | tuple[str, ...], **options: Any) -> Callable[[], Any]:
    tokenizer, seq_len = options.pop("tokenizer", BYTES), options.pop("seq_len", 8)
    model = {"vocab_size": options.pop("vocab_size", None)}
    cut = {
        name: options.pop(name)
        for name in ("packing", "document_mask", "truncate")
        if name in options
    }
    return lambda: open_rows(
        Source(source, **options),
        Packing(seq_len, **cut),
        tokenizer=tokenizer,
        cache=Path("cache"),
        **model,
    )


def test_error_of_a_library_without_text_is_named_by_its_class() -> None:
    assert [first_line(error) for error in (OSError(), ValueError("\n first\nsecond"))] == [
        "OSError",
        "first",
    ]


# --- sources -----------------------------------------------------------------------------------------------------


def test_missing_source(folder: Path) -> None:
    expected = (
        f"stdlib, hf:ID, a prepared folder, or a file, folder or glob, relative to {folder}"
    )
    fix = "--data.source PATH   (or stdlib, or hf:ID for a dataset on the Hub)"
    assert said(read("corpus")) == [("data.source = 'corpus' does not exist", expected, fix)]
    (folder / "corpus").symlink_to("corpus")  # to itself: what is not there is no fix
    assert said(read("corpus")) == [("data.source = 'corpus' does not exist", expected, fix)]
    (folder / "corpus").unlink()
    (folder / "corpora").mkdir()
    assert said(read("corpra"))[0][2] == "--data.source corpora"
    (folder / "two words").mkdir()
    assert said(read("two wrds"))[0][2] == "--data.source 'two words'"
    assert said(read("stdlb"))[0][2] == "--data.source stdlib"
    assert said(read(("stdlib", "corpra")))[0][2] == "in the list: corpora"
    os.mkfifo(folder / "corpus")  # as a shell's <(zcat FILE)
    assert said(read("corpus")) == [
        (
            "data.source = 'corpus' is neither a file nor a folder",
            expected,
            "--data.source corpora",
        )
    ]


def test_fix_for_a_field_is_quoted_as_yaml_needs_it(folder: Path) -> None:
    (folder / "x.csv").write_text("label, text\n1,hello\n")
    ((_, _, fix),) = said(read("x.csv"))
    command = shlex.split(fix.removeprefix("--data.fields "))
    assert command == ['{text: " text"}'] and read_yaml(command[0]) == {"text": " text"}


def test_glob_without_a_match(folder: Path) -> None:
    assert said(read("*.txt")) == [
        (
            "data.source = '*.txt' matches no file",
            f"at least one {KINDS} file, relative to {folder}",
            "find -L . -type f | head   shows what is there",
        )
    ]
    assert said(read("nowhere/deep/*.txt"))[0][2].startswith("find -L . -type f ")
    (folder / "a.rst").touch()
    assert said(read("*.rst"))[0][0] == "data.source = '*.rst' matches no file that can be read"


def test_folder_without_text(folder: Path) -> None:
    (folder / "corpus").mkdir()
    what = "data.source = 'corpus': no file in this folder can be read"
    looked_for = f"at least one {KINDS} file, at any depth, not hidden; corpus has "
    fix = "--data.source FOLDER   (a folder that holds such files)"
    assert said(read("corpus")) == [(what, looked_for + "no file", fix)]
    (folder / "corpus" / "x.arrow").touch()
    (folder / "corpus" / "y.rst").touch()
    (folder / "corpus" / "z.csv").touch()
    assert said(read("corpus")) == [(what, looked_for + "1 .arrow, 1 .rst, 1 empty", fix)]


@pytest.mark.parametrize("source", ["saved", "hf:saved"])
def test_damaged_folder_of_save_to_disk(folder: Path, source: str) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk("saved")
    next(Path("saved").glob("*.arrow")).write_bytes(b"cut")
    ((what, expected, fix),) = said(read(source))
    assert what.startswith(
        f"data.source = '{source}' is a folder written by save_to_disk that cannot be read: "
    )
    assert expected == "the complete folder, as datasets.load_from_disk reads it"
    assert fix == "copy the folder or save the dataset again"


def test_split_that_a_saved_dataset_lacks(folder: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        "saved"
    )
    assert said(read("saved")) == [
        ("data.split = 'train': 'saved' has no such split", "one of test", "--data.split test")
    ]
    read("saved", split="test")()


def test_unknown_extension(folder: Path) -> None:
    (folder / "a.rst").write_text("text")
    assert said(read("a.rst")) == [
        (
            "data.source = 'a.rst': files of type .rst are not supported",
            f"one of {KINDS}",
            "convert it to one of these kinds, or rename it if it is plain text: cp a.rst a.rst.txt",
        )
    ]
    (folder / "b.txt.bz2").write_bytes(bz2.compress(b"text"))
    assert said(read("b.txt.bz2"))[0][2] == "bunzip2 -k b.txt.bz2"
    (folder / "c.gz").write_bytes(gzip.compress(b"text"))
    assert said(read("c.gz"))[0][2] == (
        "name it after what is inside, as text or rows: cp c.gz c.txt.gz   or   cp c.gz c.jsonl.gz"
    )


def test_the_fix_of_a_table_of_another_kind_converts_it(folder: Path) -> None:
    (folder / "a b.tsv").write_text("text\tid\n" + "some words\t1\n" * 9)
    [(_, _, fix)] = said(read("a b.tsv"))
    subprocess.run(["sh", "-c", fix.replace("python", sys.executable)], check=True, timeout=60)
    read("a b.parquet")()


def test_address(folder: Path) -> None:
    expected = "files on this machine or at s3://BUCKET/PREFIX, or hf:OWNER/NAME for a dataset on the Hub"
    fixes = {
        "https://host/a.jsonl": "wget https://host/a.jsonl -P DIR   then --data.source DIR",
        "az://c/d": "download az://c/d to DIR   then --data.source DIR",
        "hf://datasets/owner/name/a.jsonl": "--data.source hf:owner/name   (all files of the dataset)",
    }
    (folder / "a.txt").touch()
    for address, fix in fixes.items():
        what = f"data.source = {address!r} is an address: text at {address.partition(':')[0]}:// is not read"
        assert said(read(address)) == [(what, expected, fix)]
        assert said(read(("a.txt", address))) == [
            (what, expected, fix.replace("--data.source ", "in the list: "))
        ]
    for address in (
        "https://me:key@host/a.jsonl",
        "https://host/a.jsonl?X-Amz-Signature=key#key",
    ):
        assert said(read(address)) == said(read("https://host/a.jsonl"))


def test_store_in_a_list(folder: Path) -> None:
    prepare(open_text_of(folder, "abc"), BYTES, to=Path("st"))
    ((what, expected, fix),) = said(rows(("a.txt", "st")))
    assert what == "data.source is a list, but 'st' in it is a token store"
    assert expected == "sources of text, which are encoded together"
    mixture = "{source-1: {source: a.txt, weight: 1}, source-2: {source: st, weight: 1}}"
    assert fix == f"--data.mixture '{mixture}'   (any weights)"


def test_fix_of_conversations_read_as_text(folder: Path) -> None:
    """Neither half of a conversation, nor a list of messages, is offered as the text."""
    apply = (
        "leave data.format out: conversations are found by their columns; columns of other names: --data.fields "
        "'{prompt: NAME, completion: NAME}'   (or one field of text: --data.fields '{text: NAME}')"
    )
    rows_of = {
        "messages": {"messages": [{"role": "user", "content": "hi"}], "id": "a"},
        "pairs": {"prompt": "hi", "completion": "ho"},
    }
    for name, row in rows_of.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), f"{name}.parquet")
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text(json.dumps(row) + "\n")
        for source in (f"{name}.jsonl", f"{name}.parquet", f"hf:{name}"):
            assert said(read(source))[0][2] == apply
    for source in ("messages.jsonl", "messages.parquet", "hf:messages"):
        assert said(read(source, text_field="messages"))[0][2] == apply


def test_file_that_is_not_utf8(folder: Path) -> None:
    (folder / "a.txt").write_bytes("café".encode("latin1"))
    assert said(read("a.txt")) == [
        (
            "a.txt is not UTF-8: byte 0xe9 at offset 3",
            "text files in UTF-8",
            f"iconv -f LATIN1 -t UTF-8 a.txt > NEW, or {SKIP}",
        )
    ]


def test_text_in_utf16_is_converted_from_that(folder: Path) -> None:
    """From LATIN1, every second character would be a NUL, and nothing would say so."""
    for byte_order in ("utf-16-le", "utf-16-be"):
        (folder / "a.txt").write_bytes("\ufeffcafé".encode(byte_order))
        ((_, _, fix),) = said(read("a.txt"))
        subprocess.run(fix.partition(", or ")[0], shell=True, check=True)
        assert (folder / "NEW").read_text() == "café"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.txt.gz"])
def test_rows_in_utf16_are_one_error_and_converted(folder: Path, name: str) -> None:
    """Tables saved as "Unicode text" are; each of their lines would be another error."""
    text = "text\ncafé\n" if name.endswith(".csv") else '{"text": "café"}\n{"text": "b"}\n'
    packed = gzip.compress if name.endswith(".gz") else bytes
    (folder / name).write_bytes(packed(text.encode("utf-16")))
    ((what, expected, fix),) = said(read(name))
    assert what.startswith(f"{name} is not UTF-8: ") and expected == "text files in UTF-8"
    command, _, skip = fix.partition(", or ")
    subprocess.run(command, shell=True, check=True)
    assert (folder / "NEW").read_text() == text and skip == SKIP


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_that_no_comma_separates(separator: str, folder: Path) -> None:
    """Read as one column, all of them would be the text."""
    lines = (["id", "text"], ["1", "one; two, three"])
    with (folder / "it's.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(lines)
    for text_field in ("text", f"id{separator}text"):
        ((what, _, fix),) = said(read("it's.csv", text_field=text_field))
        assert what == f"it's.csv has columns separated by {separator!r}"
    subprocess.run(fix, shell=True, check=True)
    with (folder / "NEW.csv").open(newline="") as file:
        assert tuple(csv.reader(file)) == lines
    assert read("NEW.csv")().info.num_documents == 1


def test_column_that_is_there_twice(folder: Path) -> None:
    (folder / "a.csv").write_text("id,text,text\n1,one,two\n")
    both = [pyarrow.array(["one"]), pyarrow.array(["two"])]
    pyarrow.parquet.write_table(pyarrow.table(both, names=["text", "text"]), "a.parquet")
    for name in ("a.csv", "a.parquet"):
        assert said(read(name)) == [
            (
                f"{name} has 2 columns named 'text'",
                "unique column names: otherwise which one is read would be a guess",
                "rename all but one of them",
            )
        ]
    (folder / "a.csv").write_text("id,text,id\n1,one,2\n")
    assert read("a.csv")().info.num_documents == 1


def test_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.txt").touch()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # The superuser of a test machine may read everything.
    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert said(lambda: open_text(Source("a.txt")).fingerprint) == [
        (
            "a.txt cannot be read: Permission denied",
            "files that this user may read",
            "chmod u+r a.txt   (or leave the file out of the source)",
        )
    ]


def test_source_without_text(folder: Path) -> None:
    (folder / "a.txt").touch()
    assert said(rows("a.txt")) == [
        (
            "data.source = 'a.txt' contains no text (empty documents: 1, skipped: 0)",
            "at least one document with text",
            "--data.source PATH   (a file or folder with text)",
        )
    ]
    (folder / "b.jsonl").write_text("nope\n")
    assert said(rows("b.jsonl", skip_bad_lines=True))[0][0].endswith(
        "(empty documents: 0, skipped: 1)"
    )


def test_source_shorter_than_a_row(folder: Path) -> None:
    (folder / "a.txt").write_text("four")
    assert said(rows("a.txt")) == [
        (
            "data.source has 5 tokens: too few for one row",
            "more than data.seq_len = 8 tokens",
            "--data.seq_len 2   (or a larger source)",
        )
    ]


def test_source_of_single_tokens(folder: Path) -> None:
    made = prepare(open_text_of(folder, "ab"), BYTES, to=folder / "st")
    index = made.prefix.with_suffix(".idx")
    lengths, bounds = [1, 1, 1], [0, 1, 2, 3]
    index.write_bytes(index_of(lengths=lengths, bounds=bounds))
    made.prefix.with_suffix(".json").unlink()
    assert said(lambda: PaddedRows(TokenStore(made.prefix), seq_len=8)) == [
        (
            "data.source has 3 documents, none with 2 or more tokens: no row",
            "a document with a token and one to predict after it",
            "--data.packing concat   (or a larger source)",
        )
    ]


# --- rows of .jsonl and .parquet ---------------------------------------------------------------------------------


def test_lines_that_cannot_be_used_are_named_together(folder: Path) -> None:
    lines = [
        '{"text": "good"}',
        '{"text": ',
        "[1, 2]",
        '{"body": 1}',
        '{"text": null}',
        '{"text": 5}',
        r'{"text": "\ud800"}',
    ]
    (folder / "x.jsonl").write_text("\n".join(lines))
    problems = said(rows("x.jsonl"))
    assert [(what, expected) for what, expected, _ in problems] == [
        (
            "x.jsonl, line 2: not JSON: Expecting value at character 8",
            "one JSON object per line",
        ),
        (
            "x.jsonl, line 3: a list, not an object",
            'one JSON object per line: {"text": "..."}',
        ),
        ("x.jsonl, line 4: no field 'text'; it has body", "the text's field in every row"),
        ("x.jsonl, line 5: field 'text' is null, not text", "a text in every row"),
        ("x.jsonl, line 6: field 'text' is a number, not text", "a text in every row"),
        (
            r"x.jsonl, line 7: half of a surrogate pair (\ud8xx) in the text",
            "text that can be written as UTF-8",
        ),
    ]
    assert {fix for _, _, fix in problems} == {CORRECT}


@pytest.mark.parametrize("name", ["x.jsonl", "x y.ndjson"])
def test_a_file_that_is_one_list_is_named_by_its_kind(folder: Path, name: str) -> None:
    """To skip what is wrong would skip everything."""
    (folder / name).write_text('[\n  {"text": "good"},\n  {"text": "better"}\n]\n')
    where, listed = (shlex.quote(each) for each in (name, f"{name.partition('.')[0]}.json"))
    first = (
        f"{name}, line 1: a list, not an object",
        "one JSON object per line",
        f"mv {where} {listed}",
    )
    assert said(rows(name))[0] == first


def test_many_bad_lines_are_counted(folder: Path) -> None:
    (folder / "x.jsonl").write_text("nope\n" * 25)
    problems = said(rows("x.jsonl"))
    assert len(problems) == 3
    assert problems[-1][0] == (
        "x.jsonl, line 3: not JSON: Expecting value at character 0\n  (and 22 more like these)"
    )


def test_field_that_no_row_has(folder: Path) -> None:
    (folder / "x.jsonl").write_text('{"txt": "a", "id": 1}\n{"txt": "b", "url": ""}\n')
    error = [
        (
            "data.fields.text = 'text': x.jsonl: none of the first 2 rows has this field",
            "one of the existing fields: txt, id, url",
            "--data.fields '{text: txt}'",
        )
    ]
    assert said(rows("x.jsonl")) == error
    assert said(rows("x.jsonl", skip_bad_lines=True)) == error
    assert said(read("x.jsonl", text_field="text")) == error


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        (("id", "question", "answer"), "{prompt: question, completion: answer}"),
        (
            ("instruction", "context", "response"),
            "{instruction: instruction, input: context, output: response}",
        ),
        (
            ("system_prompt", "question", "response"),
            "{instruction: question, system: system_prompt, output: response}",
        ),
        (("id", "Question", "Answer"), "{prompt: Question, completion: Answer}"),
        (("prompt", "response"), "{prompt: prompt, completion: response}"),
        (("conversation",), "{messages: conversation}"),
        (("question", "context"), "{text: context}"),
    ],
)
def test_questions_with_answers_are_no_text(
    folder: Path, columns: tuple[str, ...], fix: str
) -> None:
    """Whoever pastes the fix trains on the answers, not on the questions alone."""
    (folder / "x.jsonl").write_text(json.dumps(dict.fromkeys(columns, "a b c")) + "\n")
    ((_, _, pasted),) = said(rows("x.jsonl"))
    assert pasted.startswith(f"--data.fields '{fix}'")


@pytest.mark.parametrize(
    ("train", "held_out", "fix"),
    [
        (
            "d/data/train-00000-of-00001.jsonl",
            "d/data/test-00000-of-00001.jsonl",
            "'d/data/*train*'",
        ),
        ("d/gsm_train.jsonl", "d/gsm_validation.jsonl", "'d/*train*'"),
        ("d/train/a.txt", "d/test/a.txt", "d/train"),
    ],
)
def test_folder_of_several_splits(folder: Path, train: str, held_out: str, fix: str) -> None:
    """A test set that is trained on proves nothing; whoever pastes the fix reads one of them, or all knowingly."""
    for name in (train, held_out, "d/code/train.py", "d/code/test/a.py", "d/code/test/b.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"text": name}) + "\n")
    ((what, _, pasted),) = said(rows("d"))
    assert what.startswith("data.source = 'd' holds several splits: ")
    assert pasted.startswith(f"--data.source {fix}   or   --data.source ")
    sources = [shlex.split(part)[-1] for part in pasted.partition("   (")[0].split("   or   ")]
    every = shlex.split(pasted.rpartition("(all of it: ")[2].rstrip(")"))[0]
    num_files = [len(open_text(Source(each)).pieces) for each in (*sources, every, "d/code")]
    assert num_files == [1, 1, 2, 3]


def test_parquet_field(folder: Path) -> None:
    for name in ("a", "b"):
        pyarrow.parquet.write_table(
            pyarrow.table({"content": ["a"], "n": [1]}), f"{name}.parquet"
        )
    assert said(read("*.parquet", text_field="contents")) == [
        (
            f"data.fields.text = 'contents': {name}.parquet: no such field",
            "one of the existing fields: content, n",
            "--data.fields '{text: content}'",
        )
        for name in ("a", "b")
    ]
    assert said(read("a.parquet", text_field="n")) == [
        (
            "data.fields.text = 'n': a.parquet: the field is int64, not text",
            "a field of text; tokens made by other programs are read as a .bin/.idx store",
            "--data.fields '{text: NAME}'   (a field that holds text)",
        )
    ]


def test_file_that_is_no_parquet(folder: Path) -> None:
    (folder / "a.parquet").write_bytes(b"PAR1 and then nothing")
    ((what, expected, fix),) = said(read("a.parquet"))
    assert what.startswith("a.parquet is not readable as .parquet: ")
    assert (expected, fix) == (
        "a complete .parquet file",
        f"copy or make the file again, or {SKIP}",
    )


# --- datasets of the Hub -----------------------------------------------------------------------------------------


@pytest.fixture
def dataset(folder: Path) -> Path:
    (folder / "ds").mkdir()
    (folder / "ds" / "train.jsonl").write_text('{"body": "a", "n": 1}\n')
    return folder / "ds"


def test_dataset_field(dataset: Path) -> None:
    assert said(read("hf:ds")) == [
        (
            "data.fields.text = 'text': hf:ds: no such field",
            "one of the existing fields: body, n",
            "--data.fields '{text: body}'",
        )
    ]
    assert (
        said(read("hf:ds", text_field="n"))[0][0]
        == "data.fields.text = 'n': hf:ds: the field is int64, not text"
    )


def test_dataset_split_and_configuration(dataset: Path) -> None:
    ((what, _, fix),) = said(read("hf:ds", text_field="body", split="validation"))
    assert what.startswith("data.split = 'validation': 'hf:ds' has no such split: ")
    assert "['train']" in what
    assert fix == "--data.split NAME   (one of the splits above)"
    ((what, _, fix),) = said(read("hf:ds", text_field="body", config_name="en"))
    assert what.startswith("data.config_name = 'en': ") and "['default']" in what
    assert fix == "--data.config_name NAME   (one of those above)"


def test_dataset_folder_that_is_missing_or_empty(folder: Path) -> None:
    fix = "--data.source hf:FOLDER   (a folder with .jsonl, .parquet, .csv or .txt files)"
    assert said(read("hf:./nope")) == [
        (
            "data.source = 'hf:./nope' is not a folder",
            f"hf:OWNER/NAME as on the Hub, or hf:FOLDER, relative to {folder}",
            fix,
        )
    ]
    (folder / "ds").mkdir()
    ((what, _, empty_fix),) = said(read("hf:ds"))
    assert what.startswith("data.source = 'hf:ds' has no data: ") and empty_fix == fix


def test_dataset_with_a_broken_file(dataset: Path) -> None:
    (dataset / "train.jsonl").write_text('{"body": "a"}\nnope\n')
    ((what, expected, fix),) = said(read("hf:ds", text_field="body"))
    assert what.startswith(
        "data.source = 'hf:ds' exists, but one of its files cannot be read: JSON parse error"
    )
    assert expected == "data files that datasets.load_dataset can read"
    assert (
        fix == "--data.source ds   (reads the files of a folder directly, and names the line)"
    )


def test_dataset_without_a_way_to_the_hub(folder: Path) -> None:
    ((what, expected, fix),) = said(read("hf:owner/name"))
    assert what.startswith(
        "data.source = 'hf:owner/name' is not in the cache, and the Hub could not be reached: "
    )
    assert expected == "a dataset downloaded before, a folder, or a connection to the Hub"
    assert fix == (
        "hf download --repo-type dataset owner/name   on a machine with internet, then --data.source hf:FOLDER"
    )


def test_dataset_that_is_not_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.exceptions import DatasetNotFoundError

    def not_found(*_: object, **__: object) -> None:
        raise DatasetNotFoundError(
            "Dataset 'owner/name' doesn't exist on the Hub or cannot be accessed."
        )

    monkeypatch.setattr("datasets.load_dataset", not_found)
    assert said(read("hf:owner/name")) == [
        (
            "data.source = 'hf:owner/name' is not on the Hub, or you have no access: "
            "Dataset 'owner/name' doesn't exist on the Hub or cannot be accessed.",
            "hf:OWNER/NAME as on the Hub, or hf:FOLDER",
            "check the name and the revision; for a gated dataset   hf auth login",
        )
    ]


# --- tokenizers --------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(folder: Path) -> Path:
    (folder / "tok").mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save("tok/tokenizer.json")
    return folder / "tok"


def test_tokenizer_that_is_not_there(folder: Path) -> None:
    assert said(lambda: load_tokenizer("./tok")) == [
        (
            "data.tokenizer = './tok' does not exist",
            "bytes, a folder with tokenizer.json, or an id on the Hub as owner/name",
            "check the path   (for random weights also: --data.tokenizer bytes)",
        )
    ]
    ((what, _, fix),) = said(lambda: load_tokenizer("owner/name"))
    assert what.startswith(
        "data.tokenizer = 'owner/name' is not a local folder, and the Hub could not be reached: "
    )
    assert fix == (
        "hf download owner/name   on a machine with internet, then --data.tokenizer FOLDER   "
        "(for random weights also: --data.tokenizer bytes)"
    )


def test_a_hub_that_cannot_answer_now_is_said_with_its_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the libraries make of it: its status is behind their error."""
    busy = httpx.Response(503, request=httpx.Request("HEAD", "https://huggingface.co"))

    def unreachable(*_: object, **__: object) -> None:
        try:
            raise HfHubHTTPError("Service Unavailable", response=busy)
        except HfHubHTTPError as error:
            raise FileNotFoundError("no such file here, nor on the Hub") from error

    for loads in ("datasets.load_dataset", "huggingface_hub.snapshot_download"):
        monkeypatch.setattr(loads, unreachable)
    for reads in (read("hf:owner/name"), lambda: load_tokenizer("owner/name")):
        ((what, _, _),) = said(reads)
        assert what.endswith(
            " (HTTP 503, which is temporary: run the same command again later)"
        )


def test_errors_that_name_one_another_as_their_cause_are_read_once() -> None:
    first, second = OSError("first"), OSError("second")
    first.__cause__, second.__context__ = second, first
    assert first_line(first) == "first"


def test_folder_without_tokenizer(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert said(lambda: load_tokenizer("model")) == [
        (
            "data.tokenizer = 'model' contains no tokenizer",
            "tokenizer.json, or an older vocabulary "
            "(*.model, vocab.json, vocab.txt, merges.txt, *.tiktoken, tekken.json), in model",
            "the id or folder of a model that comes with its tokenizer   "
            "(for random weights also: --data.tokenizer bytes)",
        )
    ]


def test_tokenizer_without_end_token(tokenizer: Path) -> None:
    # No token of the vocabulary.
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert said(lambda: load_tokenizer("tok")) == [
        (
            "data.tokenizer = 'tok' names no end token",
            '"eos_token" or "eos_token_id" in one of tokenizer_config.json, special_tokens_map.json, '
            "generation_config.json, config.json: it ends each document",
            'add   "eos_token": "TOKEN"   to tokenizer_config.json, a token of the vocabulary',
        )
    ]


def test_tokenizer_with_damaged_files(tokenizer: Path) -> None:
    (tokenizer / "config.json").write_text("{")
    ((what, _, fix),) = said(lambda: load_tokenizer("tok"))
    assert (
        what.startswith("tok/config.json is not JSON: ")
        and fix == "download or save the tokenizer again"
    )
    (tokenizer / "tokenizer.json").write_text("{}")
    ((what, expected, _),) = said(lambda: load_tokenizer("tok"))
    assert what.startswith("data.tokenizer = 'tok' cannot be read: ")
    assert expected == "a tokenizer that the installed tokenizers or transformers can read"


def test_text_without_tokenizer(folder: Path) -> None:
    (folder / "a.txt").write_text("text")
    assert said(rows("a.txt", tokenizer=None)) == [
        (
            "data.source = 'a.txt' is text, but no tokenizer is set",
            "a tokenizer, or a folder made by `threefold data prepare`",
            "--data.tokenizer bytes   (or a Hub id or folder)",
        )
    ]


# --- stores ------------------------------------------------------------------------------------------------------


def open_text_of(folder: Path, text: str) -> Any:
    (folder / "text.txt").write_text(text)
    return open_text(Source("text.txt"))


def index_of(
    *,
    lengths: list[int],
    bounds: list[int],
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
    offsets: list[int] | None = None,
) -> bytes:
    offsets = (
        [2 * sum(lengths[:i]) for i in range(len(lengths))] if offsets is None else offsets
    )
    header = magic + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
    return header + struct.pack(
        f"<{len(lengths)}i{len(offsets) + len(bounds)}q", *lengths, *offsets, *bounds
    )


@pytest.fixture
def store(folder: Path) -> Path:
    """Four tokens of one document in st/tokens.*"""
    prepare(open_text_of(folder, "abc"), BYTES, to=Path("st"))
    return Path("st/tokens")


def with_index(store: Path, data: bytes) -> list[tuple[str, str, str]]:
    store.with_suffix(".idx").write_bytes(data)
    return said(lambda: TokenStore(store))


def test_store_that_is_not_there(store: Path) -> None:
    assert said(lambda: TokenStore("st/other")) == [
        (
            "st/other.idx does not exist",
            "a token store: PREFIX.bin with the tokens and PREFIX.idx with the documents, side by side",
            f"give the prefix of both files, or\n       {REMAKE}",
        )
    ]
    store.with_suffix(".bin").unlink()
    assert said(lambda: TokenStore(store))[0][0] == "st/tokens.bin does not exist"


def test_alien_index(store: Path) -> None:
    expected = r"a Megatron-LM .idx file, which begins with b'MMIDIDX\x00\x00'"
    what = "st/tokens.idx is not the index of a token store: it "
    assert with_index(store, b"") == [(what + "is empty", expected, REMAKE)]
    old = index_of(lengths=[4], bounds=[0, 1], magic=b"TNTIDX\x00\x00\x00")
    assert with_index(store, old) == [
        (what + r"begins with b'TNTIDX\x00\x00\x00'", expected, REMAKE)
    ]


def test_index_of_another_version_or_type(store: Path) -> None:
    expected = "version 1 and a dtype code from 1 to 8"
    what = "st/tokens.idx has version {} and dtype code {}"
    assert with_index(store, index_of(lengths=[4], bounds=[0, 1], version=2)) == [
        (what.format(2, 8), expected, REMAKE)
    ]
    assert with_index(store, index_of(lengths=[4], bounds=[0, 1], code=9)) == [
        (what.format(1, 9), expected, REMAKE)
    ]


def test_cut_index(store: Path) -> None:
    whole = index_of(lengths=[4], bounds=[0, 1])
    expected = "62 bytes for the 1 sequences and 2 bounds of its header"
    assert with_index(store, whole[:20]) == [
        ("st/tokens.idx is truncated: 20 bytes", "at least the 34 bytes of the header", COPY)
    ]
    assert with_index(store, whole[:-3]) == [
        ("st/tokens.idx is truncated: 59 bytes", expected, COPY)
    ]
    assert with_index(store, whole + b"12345") == [
        ("st/tokens.idx is too long: 67 bytes", expected, COPY)
    ]


def test_cut_tokens(store: Path) -> None:
    tokens = store.with_suffix(".bin").read_bytes()
    expected = "8 bytes according to tokens.idx: the two files belong together"
    for data, how in ((tokens[:-2], "truncated: 6"), (tokens + b"\0", "too long: 9")):
        store.with_suffix(".bin").write_bytes(data)
        assert said(lambda: TokenStore(store)) == [
            (f"st/tokens.bin is {how} bytes", expected, COPY)
        ]


def test_index_whose_documents_make_no_sense(store: Path) -> None:
    error = (
        "st/tokens.idx has document bounds that do not run from 0 to its 2 sequences",
        "bounds that begin with 0, never decrease and end with the number of sequences",
        REMAKE,
    )
    store.with_suffix(".json").unlink()
    for bounds in ([], [1, 2], [0, 1], [0, 2, 1, 2]):
        assert with_index(store, index_of(lengths=[2, 2], bounds=bounds)) == [error]


def test_index_with_gaps(store: Path) -> None:
    store.with_suffix(".json").unlink()
    assert with_index(store, index_of(lengths=[1, 2], bounds=[0, 2], offsets=[0, 4])) == [
        (
            "st/tokens.idx describes sequences that overlap or leave gaps in the .bin",
            "sequences that follow one another, so that the store is one stream of tokens",
            REMAKE,
        )
    ]


def test_record_beside_the_store(store: Path) -> None:
    record = store.with_suffix(".json")
    other = json.loads(record.read_text()) | {"num_tokens": 5}
    record.write_text(json.dumps(other))
    assert said(lambda: TokenStore(store)) == [
        (
            "st/tokens.json belongs to another store: it describes 5 tokens in 1 documents",
            "the 4 tokens in 1 documents of the .bin and .idx",
            "remove the .json to read the store as one made by another program, or copy all files again",
        )
    ]
    for text, why in (
        ("{}", "its format is not threefold-store-1"),
        ("[]", ""),
        ("{", ""),
        ('{"format": 1}', ""),
    ):
        record.write_text(text)
        ((what, expected, _),) = said(lambda: TokenStore(store))
        assert what.startswith(f"st/tokens.json does not describe a token store: {why}")
        assert (
            expected
            == "a record of format threefold-store-1, written next to the .bin and .idx"
        )


def test_store_of_another_tokenizer(store: Path, tokenizer: Path) -> None:
    (tokenizer / "config.json").write_text('{"eos_token_id": 0}')
    assert said(rows("st", tokenizer=load_tokenizer("tok"))) == [
        (
            "data.tokenizer = 'tok': st was made with another tokenizer, 'bytes' (257 ids, end token 256)",
            "the store's tokenizer; 'tok' has 1 ids, end token 0, and uses the same ids for other tokens",
            "prepare the text again with tok   (for random weights also: --data.tokenizer bytes)",
        )
    ]


def test_ids_that_the_model_has_no_embedding_for(store: Path) -> None:
    """Under tp they trained in silence: no rank has their embedding, and no rank their target."""
    for values, said_of in (
        ([1, 2, 300, 7], "300 as token 2"),
        ([5, -100, 3, 2], "-100 as token 1"),
    ):
        remade = np.array(values, "<i4")
        with StoreWriter(Path("other"), dtype=remade.dtype) as writer:
            writer.add_block(remade, np.array([1, 3], np.int32))
            writer.finish(lambda _: TokenStore(store).info)  # type: ignore[arg-type, return-value]
        Path("other.json").unlink()  # as one made by another program
        assert said(rows("other.idx", vocab_size=257)) == [
            (
                f"other.bin has the id {said_of}, in document 1 (both counted from 0); "
                f"its ids are {min(values)} to {max(values)}",
                "ids from 0 to 256: the model's vocabulary has 257 of them",
                "prepare the text again with the model's tokenizer, or use the model that the store was made for",
            )
        ]


def test_store_of_numbers_with_a_fraction(store: Path) -> None:
    tokens = np.array([1.0, 2.5, 3.0, 4.0], "<f4")
    header = store.with_suffix(".idx").read_bytes()
    offsets = np.array([0], "<i8").tobytes()
    Path("other.bin").write_bytes(tokens.tobytes())
    lengths = np.array([4], "<i4").tobytes()
    Path("other.idx").write_bytes(
        header[:9]
        + struct.pack("<QBQQ", 1, 7, 1, 2)
        + lengths
        + offsets
        + np.array([0, 1], "<i8").tobytes()
    )
    assert said(rows("other.idx", vocab_size=257, seq_len=2)) == [
        (
            "other.bin holds numbers of type float32",
            "token ids, which are whole numbers; these would be truncated",
            REMAKE,
        )
    ]


def test_several_stores_in_a_folder(folder: Path) -> None:
    (folder / "two of").mkdir()
    for name in ("a.idx", "b.idx"):
        (folder / "two of" / name).touch()
    assert said(lambda: open_store(Source("two of"), tokenizer=None, cache=folder)) == [
        (
            "data.source = 'two of' holds 2 token stores",
            "one, or the prefix of one of them",
            "--data.source 'two of/a'   or   --data.source 'two of/b'",
        )
    ]


def test_store_that_was_never_finished(folder: Path) -> None:
    (folder / "half" / ".parts-0").mkdir(parents=True)
    assert said(lambda: open_store(Source("half"), tokenizer=None, cache=folder)) == [
        (
            "data.source = 'half' is an unfinished token store",
            "a complete store: .bin, .idx and .json",
            "threefold data prepare ... --to half   as before: it continues",
        )
    ]


def test_another_store_is_not_written_over(folder: Path, store: Path) -> None:
    before = store.with_suffix(".bin").read_bytes()
    error = [
        (
            "st already holds another token store: tokens.json",
            "an empty folder, or the store of the same source and the same tokenizer",
            "--to st-2   (or remove st/tokens.bin, st/tokens.idx and st/tokens.json)",
        )
    ]
    assert said(lambda: prepare(open_text_of(folder, "other"), BYTES, to=Path("st"))) == error
    store.with_suffix(".json").unlink()
    ((what, _, _),) = said(lambda: prepare(open_text_of(folder, "other"), BYTES, to=Path("st")))
    assert what == "st already holds another token store: tokens.idx"
    assert store.with_suffix(".bin").read_bytes() == before


def test_place_where_nothing_can_be_written(folder: Path) -> None:
    """A read-only home, as containers have; root may write anywhere but there."""
    place = Path("/proc/threefold")
    assert said(lambda: prepare(open_text_of(folder, "abc"), BYTES, to=place)) == [
        (
            "/proc/threefold cannot be written: No such file or directory",
            "a folder for the tokens of the source, prepared once and read by all ranks",
            "XDG_CACHE_HOME=FOLDER threefold ...   (where prepared data is kept), or --to FOLDER of data prepare",
        )
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", full)
    assert said(
        lambda: prepare(open_text_of(folder, "abc"), BYTES, to=Path("st")), RunError
    ) == [
        (
            f"no space left on the disk of st: {os.strerror(number)}",
            "space for twice the tokens, 2 bytes each (4 for a vocabulary above 65,536): parts and store",
            "free space or choose another folder, then run the same command again: finished parts are reused",
        )
    ]


def test_document_too_long_for_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    class Long:
        def __len__(self) -> int:
            return 2**31 - 1

    documents: Any = [Long()]
    assert said(lambda: parts.joined(documents, end_id=0, dtype=np.dtype("<u2"))) == [
        (
            "a document of 2,147,483,648 tokens",
            "at most 2,147,483,647 tokens per document: a store's index counts them in 32 bits",
            "split that document into several, for example one per line of a .jsonl file",
        )
    ]


# --- packing -----------------------------------------------------------------------------------------------------


def test_packing_setting_without_effect_is_named(store: Path) -> None:
    assert said(rows("st", truncate=True), ConfigError) == [
        (
            "data.truncate = true has no effect with data.packing = concat",
            "data.packing best_fit or none: concat truncates no document",
            "remove data.truncate, or --data.packing best_fit",
        )
    ]


def test_unknown_packing(folder: Path) -> None:
    assert said(rows("nowhere", packing="bestfit"), ConfigError) == [
        (
            "data.packing = 'bestfit' is not a packing",
            "concat, best_fit, none",
            "--data.packing concat",
        )
    ]


@pytest.mark.parametrize(
    ("rows", "what", "fix"),
    [
        ({"train": [{"text": "a"}]}, "dataset is a dict", "dataset=rows['train']"),
        ("rows.jsonl", "dataset is a str", "its path in data.source of the config"),
        (
            pandas.DataFrame([{"text": "a"}]),
            "dataset is a DataFrame",
            "dataset=rows.to_dict('records')",
        ),
    ],
    ids=["splits", "a path", "a table"],
)
def test_rows_of_a_program_that_are_no_rows(
    tmp_path: Path, rows: Any, what: str, fix: str
) -> None:
    """list(rows) of splits is their names, which would have been trained on as texts."""
    with pytest.raises(DataError) as caught:
        written(rows, name="dataset", cache=tmp_path, tokenizer=ByteTokenizer)
    (problem,) = caught.value.problems
    assert (problem.what, problem.fix) == (what, fix)
