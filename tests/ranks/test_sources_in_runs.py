"""What whole commands say of the files of their sources: which are read and left out, and where they are listed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ranks.runs import command, curve, prepare


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text in the open, compressed and linked, and what is no text."""
    prepare(tmp_path)
    row = json.dumps({"text": "a row that is compressed " * 9})
    (tmp_path / "corpus" / "rows.jsonl.gz").write_bytes(gzip.compress(row.encode()))
    (tmp_path / "corpus" / "weights.bin").touch()
    (tmp_path / "corpus" / "link.txt").symlink_to("part-0.txt")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "held.txt").write_text("held out " * 99)
    return tmp_path


def lines_of(path: Path) -> dict[str, object]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {Path(line["path"]).name: line.get("left_out", line.get("bytes")) for line in lines}


def test_train_lists_its_files_and_goes_on_with_them(folder: Path) -> None:
    mesh = ("--mesh.dp", "1", "--mesh.cp", "1", "--mesh.tp", "1", "--log.dir", "run")
    sources = ("--data.source", "[corpus, 'corpus/*.txt']", "--eval.source", "[held]")
    done = command(folder, "train", "config.yaml", *mesh, *sources, "--train.steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  data   [corpus, corpus/*.txt] (bytes): " in done.stdout
    # The glob of the list matches the four texts and the link again.
    left = "7 left out (6 read already, 1 .bin); listed in run/data.files.jsonl\n"
    (line,) = (
        line for line in done.stdout.splitlines(keepends=True) if line.startswith("  files  ")
    )
    assert line.startswith("  files  6 files read (") and line.endswith(left)
    listed = lines_of(folder / "run" / "data.files.jsonl")
    assert (
        listed["held.txt"] == 891 and listed["link.txt"] == "the same file as corpus/part-0.txt"
    )
    # The run's own config names them from any folder, and the run goes on with the same data.
    again = command(folder / "held", "resume", "../run", "--train.steps", "6")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(curve(folder / "run")) == 6
    proved = command(folder, "data", "audit", "run", "--contents")
    assert proved.returncode == 0, proved.stderr


def test_prepare_and_verify_say_it(folder: Path) -> None:
    sources = ("--data.source", "[corpus, held]")
    made = command(
        folder, "data", "prepare", *sources, "--data.tokenizer", "bytes", "--to", "store"
    )
    assert made.returncode == 0, made.stderr
    files = "6 files read (25.12 KiB), 2 left out (1 read already, 1 .bin)"
    assert made.stderr.startswith(f"{files}\n")
    assert made.stderr.endswith("the files are listed in store/data.files.jsonl\n")
    assert (
        lines_of(folder / "store" / "data.files.jsonl")["link.txt"]
        == "the same file as corpus/part-0.txt"
    )
    verified = command(
        folder, "verify", "config.yaml", "--mesh.dp", "1", "--mesh.cp", "1", "--mesh.tp", "1"
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "files: 5 files read (" in verified.stdout


def test_fix_of_prepare_can_be_pasted(folder: Path) -> None:
    """Pasted behind the command, the fix for another field makes the store."""
    (folder / "rows.csv").write_text("id,body\n1,one\n")
    asked = (
        "data",
        "prepare",
        "--data.source",
        "rows.csv",
        "--data.tokenizer",
        "bytes",
        "--to",
        "rows",
    )
    refused = command(folder, *asked)
    assert refused.returncode == 2
    assert refused.stderr.endswith(
        "fix: --data.fields '{text: body}'   (or another field of text: id)\n"
    ), refused.stderr
    assert command(folder, *asked, "--data.fields", "{text: body}").returncode == 0


def test_control_tokens_that_texts_spell_out_are_named(tmp_path: Path) -> None:
    """Trained on as letters, `<|end|>` is not what a chat template writes; as control tokens it is."""
    words = {"<|end|>": 0, "a": 1, "<": 2, "|": 3, ">": 4, "end": 5}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Punctuation()
    backend.add_special_tokens(["<|end|>"])
    backend.decoder = decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (tmp_path / "a.txt").write_text("a<|end|>" * 200)
    options = ("--data.source", "a.txt", "--data.tokenizer", ".", "--data.seq_len", "16")
    options += (
        "--train.steps",
        "1",
        "--train.global_batch",
        "1",
        "--mesh.dp",
        "1",
        "--model.admission",
        "off",
    )
    said = (
        "warning: <|end|> in a text stays text. As control tokens: --data.control_tokens ids\n"
    )
    done = command(tmp_path, "train", *options, "--log.dir", "text")
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    done = command(
        tmp_path, "train", *options, "--log.dir", "ids", "--data.control_tokens", "ids"
    )
    assert done.returncode == 0 and "control" not in done.stdout, done.stdout + done.stderr
    shown = command(tmp_path, "data", "show", *options[:4])
    assert shown.returncode == 0 and said in shown.stdout, shown.stdout + shown.stderr
    shown = command(tmp_path, "data", "show", *options[:4], "--data.control_tokens", "ids")
    assert shown.returncode == 0 and "control" not in shown.stdout, shown.stdout + shown.stderr
