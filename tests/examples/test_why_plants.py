"""`threefold why` on real runs: planted documents come first in their step, and healthy runs have no spike."""

from __future__ import annotations

import argparse
import ast
import base64
import inspect
import json
import pickle
import random
import string
import tarfile
import typing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ranks.runs import command
from threefold.audit import record
from threefold.audit.lookup import find_sample
from threefold.audit.proof import stretches_of
from threefold.data.order.order import Order
from threefold.why.batch_rows import StepBatches
from threefold.why.findings import findings, telling
from threefold.why.lookback import Lookback

FIRST_PERCENT = 95
# How many runs, of how many documents: a few of each base, and those that docs/watch.md counts, which take minutes.
PLANTED_RUNS = [
    pytest.param(2, 1600, marks=pytest.mark.examples),
    pytest.param(10, 2400, marks=pytest.mark.long),
]
HEALTHY_SEEDS = [
    # Each shape once, prose and code.
    pytest.param((0, 3, 4, 7, 8), 600, marks=pytest.mark.examples),
    pytest.param(tuple(range(20)), 900, marks=pytest.mark.long),
]
BYTES = 95
CONFIG = """
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2}
data: {source: texts.jsonl, seq_len: 96, packing: none}
optimizer: {lr: 0.003}
train: {epochs: 1, global_batch: 8}
log: {every: 1, sample_tokens: 0, dir: run}
mesh: {dp: 1}
"""
COMMON = """the of and to in a is that for it was on are as with his they at be this from have or by one had not but
what all were when we there can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see time could no make than first been its who now people my made over
did down only way find use may water long little very after words called just where most know"""
POLISH = "szczęście źdźbło gżegżółka chrząszcz brzmi trzcinie Szczebrzeszynie wyindywidualizowaliśmy łódź kość"
CODE = "".join(
    inspect.getsource(module) for module in (argparse, ast, inspect, tarfile, typing, pickle)
)


def prose(rng: random.Random) -> str:
    words = (rng.choice(COMMON.split()) for _ in range(BYTES))
    return " ".join(f"{word}." if rng.random() < 0.12 else word for word in words)


def code(rng: random.Random) -> str:
    start = rng.randrange(len(CODE) - 4 * BYTES)
    return CODE[start : start + 4 * BYTES]


def noise(rng: random.Random, _: str) -> str:
    return "".join(rng.choice(string.printable) for _ in range(BYTES))


def alphabet(rng: random.Random, _: str) -> str:
    return "".join(rng.choice("абвгдежзийклмнопрстуфхцчшщъыьэюя ") for _ in range(BYTES))


def language(rng: random.Random, _: str) -> str:
    return " ".join(rng.choice(POLISH.split()) for _ in range(BYTES))


def repeated(rng: random.Random, _: str) -> str:
    return rng.choice(["xyzzy ", "=-", "ha", "0", "lorem "]) * BYTES


def shuffled(rng: random.Random, text: str) -> str:
    return "".join(rng.sample(text[:BYTES], BYTES))


def wrong_encoding(rng: random.Random, text: str) -> str:
    return text.encode("utf-16-le").decode("latin-1")


def encoded(rng: random.Random, text: str) -> str:
    return base64.b64encode(rng.randbytes(BYTES)).decode()


def backwards(rng: random.Random, text: str) -> str:
    return text[:BYTES][::-1]


def upper(rng: random.Random, text: str) -> str:
    return text.swapcase()


def numbers(rng: random.Random, _: str) -> str:
    return " ".join(str(rng.randrange(10**9)) for _ in range(BYTES))


KINDS = (
    noise,
    alphabet,
    language,
    repeated,
    shuffled,
    wrong_encoding,
    encoded,
    backwards,
    upper,
    numbers,
)


def run_of(
    folder: Path,
    seed: int,
    *,
    base: Callable[[random.Random], str],
    documents: int,
    plants: bool,
    options: str = "",
) -> tuple[Path, dict[int, str]]:
    """A run over documents of which each is one row, and what was planted: row -> kind."""
    rng = random.Random(seed)
    texts = [base(rng) for _ in range(documents)]
    # The first half is left to the model, which finds everything strange at first.
    order = Order(documents, 8, seed=seed, shuffle=True, tail="carry")
    places = [
        8 * step + rng.randrange(8)
        for step in rng.sample(range(documents // 16, documents // 8), len(KINDS))
    ]
    rows = order.rows_at(0, np.array(places)).tolist()
    planted = dict(zip(rows, KINDS, strict=True)) if plants else {}
    for row, kind in planted.items():
        texts[row] = kind(rng, texts[row])
    cut = (text.encode()[:BYTES].decode(errors="ignore") for text in texts)
    folder.mkdir()
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in cut)
    )
    (folder / "config.yaml").write_text(CONFIG)
    seeds = ("--data.seed", str(seed), "--train.seed", str(seed))
    done = command(folder, "train", "config.yaml", *seeds, *options.split(), timeout_s=600)
    assert done.returncode == 0, done.stderr
    return folder / "run", {row: kind.__name__ for row, kind in planted.items()}


@pytest.mark.parametrize(("num_runs", "documents"), PLANTED_RUNS)
def test_planted_rows_come_first(tmp_path: Path, num_runs: int, documents: int) -> None:
    """Documents of ten kinds, among prose and among code: at least 95 % stand first in their step."""
    behind: list[str] = []
    for seed in range(num_runs):
        base = code if seed % 2 else prose
        run, planted = run_of(
            tmp_path / str(seed), seed, base=base, documents=documents, plants=True
        )
        batches, stretches = (
            StepBatches(Lookback.of(run)),
            stretches_of(record.read(run / record.FILE)),
        )
        for row, kind in planted.items():
            (read,) = find_sample(stretches, row)
            assert read.step
            rows = telling(batches.rows_of(read.step))
            if rows[0].row != row:
                place = [each.row for each in rows].index(row)
                behind.append(
                    f"{kind} in {base.__name__}, seed {seed}, step {read.step}: number {place + 1}"
                )
        # Without a step too, where texts are alike otherwise: what is told first are plants.
        named = [each.row for finding in findings(batches)[:5] for each in finding.rows]
        assert base is code or len(set(named) & set(planted)) >= 4, f"seed {seed}: {named}"
    num_planted = num_runs * len(KINDS)
    assert 100 * (num_planted - len(behind)) >= FIRST_PERCENT * num_planted, behind
    print(f"{num_planted - len(behind)} of {num_planted} first; behind: {behind}")


@pytest.mark.parametrize(("seeds", "documents"), HEALTHY_SEEDS, ids=str)
def test_healthy_runs_have_no_spike(
    tmp_path: Path, seeds: tuple[int, ...], documents: int
) -> None:
    wrong = []
    shapes = (
        "",
        "--train.global_batch 4",
        "--train.global_batch 16",
        "--data.packing concat",
        "--optimizer.lr 0.001",
    )
    for seed in seeds:
        base, options = (code if seed % 2 else prose), shapes[seed // 2 % len(shapes)]
        run, _ = run_of(
            tmp_path / str(seed),
            100 + seed,
            base=base,
            documents=documents,
            plants=False,
            options=options,
        )
        found = [
            each
            for each in findings(StepBatches(Lookback.of(run)))
            if each.kind in ("spike", "not finite")
        ]
        wrong += [
            f"seed {seed}, {base.__name__} {options}: {each.steps}, {each.what}"
            for each in found
        ]
    assert wrong == []
