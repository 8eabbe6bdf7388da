"""What a run says of its request, and what it keeps of it: the model's sizes, the learning rate, the tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ranks.runs import command, metrics, prepare
from threefold.config import loading
from threefold.data.store.index import write_index

ALONE = ("--mesh.dp", "1", "--train.steps", "2", "--mesh.device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    prepare(folder)
    done = command(folder, "train", "config.yaml", *ALONE, "--log.dir", "first")
    assert done.returncode == 0, done.stderr
    (folder / "first.out").write_text(done.stdout)
    assert command(folder, "export", "first", "--to", "exported").returncode == 0
    return folder


def rate_of(run: Path) -> float | str:
    return loading.load(str(run / "config.yaml"), environ={}).config.optimizer.lr


TUNED = (
    "train",
    "--model.name_or_path",
    "exported",
    "--data.source",
    "corpus",
    "--data.seq_len",
    "32",
    *ALONE,
)
SHORT = (
    "--train.global_batch",
    "8",
    "--log.sample_tokens",
    "0",
    "--log.every",
    "1",
    "--optimizer.warmup_steps",
    "0",
)


def test_head_shows_the_sizes_and_the_rate(folder: Path) -> None:
    head = (folder / "first.out").read_text().splitlines()
    assert (
        head[2]
        == "         2 layers, 32 wide, 4 heads, 2 kv heads, 257 tokens in the vocabulary"
    )
    assert "  lr     0.002: the weights are random" in head
    assert rate_of(folder / "first") == 2e-3


def test_pretrained_weights_get_a_rate_of_their_own_and_keep_it(folder: Path) -> None:
    done = command(folder, *TUNED, *SHORT, "--log.dir", "tuned")
    assert done.returncode == 0, done.stderr
    assert "  lr     2e-05: the weights are pretrained" in done.stdout
    assert metrics(folder / "tuned")[1]["lr"] == rate_of(folder / "tuned") == 2e-5
    more = command(folder, "train", "tuned/config.yaml", "--train.steps", "3")
    assert more.returncode == 0, more.stderr
    assert "  lr     2e-05: as given" in more.stdout
    assert rate_of(folder / "tuned") == 2e-5


def test_resumed_run_keeps_a_rate_that_was_given_once(folder: Path) -> None:
    given = command(folder, *TUNED, *SHORT, "--log.dir", "given", "--optimizer.lr", "3e-4")
    assert given.returncode == 0, given.stderr
    more = command(folder, *TUNED, *SHORT, "--log.dir", "given", "--train.steps", "3")
    assert more.returncode == 0, more.stderr
    assert "  lr     0.0003: the run began with it" in more.stdout
    assert rate_of(folder / "given") == 3e-4


def test_allowed_tokenizer_is_said(folder: Path) -> None:
    other = ("--data.tokenizer", "bytes", "--data.allow_other_tokenizer", "true")
    done = command(folder, *TUNED, *SHORT, "--log.dir", "other", *other)
    assert done.returncode == 0, done.stderr
    said = "  tokenizer: bytes, not compared with the model's own: data.allow_other_tokenizer"
    assert said in done.stdout.splitlines()


def test_ids_that_no_tp_rank_has_are_refused(folder: Path) -> None:
    """Both ranks trained them without a word: a masked embedding, and a target that no rank hits."""
    tokens = np.arange(2000, dtype="<i4") % 250
    tokens[777] = 5000
    (folder / "made").mkdir()
    (folder / "made" / "x.bin").write_bytes(tokens.tobytes())
    with (folder / "made" / "x.idx").open("wb") as file:
        write_index(file, np.array([2000], np.int32), dtype=tokens.dtype)
    done = command(
        folder,
        "train",
        "config.yaml",
        "--data.source",
        "made",
        "--mesh.tp",
        "2",
        "--log.dir",
        "outside",
    )
    assert done.returncode == 2
    assert done.stderr == (
        "made/x.bin has the id 5000 as token 777, in document 0 (both counted from 0); its ids are 0 to 5000\n"
        "  expected: ids from 0 to 256: the model's vocabulary has 257 of them\n"
        "  fix: prepare the text again with the model's tokenizer, or use the model that the store was made for\n"
    )
    assert not (folder / "outside").exists()
