"""Batches of rows of like length, cut to their longest: equal on every mesh, resumed inside a window, proved."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ranks.reference import TINY_LLAMA, require
from ranks.runs import command, curve, metrics
from ranks.spawn import run_ranks
from threefold.check.compare import LOSS, compare_numbers

pytestmark = pytest.mark.ranks

MODEL = {**TINY_LLAMA, "vocab_size": 257, "max_position_embeddings": 128}
SEQ_LEN = 96
CONFIG = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2, initializer_range: 0.2}
data: {source: texts.jsonl, tokenizer: bytes, seq_len: 96, packing: none, document_mask: true, group_by_length: true}
mesh: {dp: 1, cp: 1, tp: 1}
train: {steps: 20, global_batch: 8}
optimizer: {schedule: constant}
log: {every: 1, sample_tokens: 0}
"""
MESHES = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 2, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grouped")
    words = random.Random(0)
    texts = [
        "".join(words.choices("abcde ", k=int(min(95, 2 + words.expovariate(0.05)))))
        for _ in range(61)
    ]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (folder / "config.yaml").write_text(CONFIG)
    made = command(
        folder,
        *(
            "data",
            "prepare",
            "--data.source",
            "texts.jsonl",
            "--data.tokenizer",
            "bytes",
            "--to",
            "store",
        ),
    )
    assert made.returncode == 0, made.stderr
    return folder


def cut_and_whole(sizes: tuple[int, int, int, int], prefix: str) -> Any:
    """Loss and gradient norm of a step of short rows, cut to the longest of them and not, at the same weights."""
    from threefold.config.schema import Config
    from threefold.data.order.order import Order
    from threefold.data.rows.packing import Packing
    from threefold.data.sampling.loader import TokenLoader
    from threefold.data.store.store import TokenStore
    from threefold.mesh.divisibility import shared_length
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.batches import cut, micro_batches
    from threefold.training.step import TrainStep, mean_loss

    replicate, shard, cp, tp = sizes
    rows: Any = Packing(SEQ_LEN, "none", document_mask=True).pack(TokenStore(prefix))
    mesh = init_mesh(replicate * shard, dp_shard=shard, cp=cp, tp=tp, device="cpu")
    order = Order(rows.num_rows, 8, seed=0, shuffle=True, tail="carry", lengths=rows.lengths)
    loader = TokenLoader(
        rows, order, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, document_mask=True
    )
    for batch in loader:  # noqa: B007
        assert loader.longest is not None
        if (length := shared_length(loader.longest, mesh.topology)) <= SEQ_LEN // 2:
            break
    config = Config.model_validate(
        {"model": {"config": MODEL}, "data": {"document_mask": True, "seq_len": SEQ_LEN}}
    )
    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, build_optimizer(model.module, config.optimizer))
    found = []
    for taken in (batch, cut(batch, length)):
        result = step.run(micro_batches(taken, 2), lr=0.0)
        found.append((mean_loss(result, mesh), result.grad_norm.item()))
    return length, found


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_cut_batch_has_the_loss_of_the_padded_one(
    sizes: tuple[int, int, int, int], folder: Path
) -> None:
    results = run_ranks(cut_and_whole, math.prod(sizes), sizes, str(folder / "store/tokens"))
    for length, ((whole, whole_norm), (cut, norm)) in results:
        print(
            f"{sizes}: {length} places, loss {abs(cut - whole):.1e}, norm {abs(norm / whole_norm - 1):.1e}"
        )
        assert abs(cut - whole) <= 1e-6 and abs(norm - whole_norm) <= 1e-5 * whole_norm
        assert length == results[0][0] <= SEQ_LEN // 2, "ranks disagree about the length"


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    done = command(
        folder, "train", "config.yaml", "--log.dir", "run", "--checkpoint.every", "5"
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize("others", ["1", "2"])
def test_grouped_run_is_the_same_on_every_mesh(others: str, folder: Path, run: Path) -> None:
    mesh = ("--mesh.dp", "2", "--mesh.cp", others, "--mesh.tp", others)
    done = command(folder, "train", "config.yaml", *mesh, "--log.dir", f"mesh-{others}")
    assert done.returncode == 0, done.stderr
    require(
        compare_numbers(
            LOSS,
            *([loss for loss, *_ in curve(each)] for each in (folder / f"mesh-{others}", run)),
        )
    )


def test_padding_that_is_not_computed_is_not_counted(folder: Path, run: Path) -> None:
    """61 rows of 18 tokens on average in 96 places: batches of 8 are cut to about a third."""
    found = [
        round(line["tokens_per_s"] * line["step_time_s"]) for line in metrics(run).values()
    ]
    assert all(each % 8 == 0 and each <= 8 * SEQ_LEN for each in found)
    assert sum(found) <= 0.5 * len(found) * 8 * SEQ_LEN and len(set(found)) > 5


def test_stopped_inside_a_window_resumes_bit_for_bit_and_elsewhere(
    folder: Path, run: Path
) -> None:
    first = command(folder, "train", "config.yaml", "--log.dir", "cut", "--train.steps", "11")
    assert first.returncode == 0, first.stderr
    copy = Path(shutil.copytree(folder / "cut", folder / "cut-elsewhere"))
    again = command(folder, "resume", "cut", "--train.steps", "20", "--data.num_workers", "1")
    assert again.returncode == 0, again.stderr
    assert curve(folder / "cut") == curve(run)
    moved = command(
        folder, "resume", str(copy), "--train.steps", "20", "--mesh.dp", "2", "--mesh.cp", "2"
    )
    assert moved.returncode == 0, moved.stderr
    require(
        compare_numbers(LOSS, *([loss for loss, *_ in curve(each)] for each in (copy, run)))
    )
    for each in ("cut", str(copy)):
        proved = command(folder, "data", "audit", each, "--contents")
        assert proved.returncode == 0 and "samples and tokens" in proved.stdout, (
            proved.stdout + proved.stderr
        )
        assert "epoch 0: 61 of 61 rows, each exactly once" in proved.stdout
    shown = command(folder, "data", "order", "cut", "--sample", "7")
    assert shown.returncode == 0 and "row 7: step " in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            ("--data.group_by_length", "false"),
            "group_by_length = 50 batches of 8 rows, but here group_by_length = (not",
        ),
        (
            ("--train.global_batch", "4"),
            "group_by_length = 50 batches of 8 rows, but here group_by_length = 50 batch",
        ),
    ],
)
def test_resume_in_another_grouping_is_refused(
    folder: Path, run: Path, changed: tuple[str, str], said: str
) -> None:
    refused = command(folder, "resume", "run", "--train.steps", "25", *changed)
    assert refused.returncode == 2 and said in refused.stderr, refused.stderr
    assert "pass the group_by_length and global_batch that the run began with" in refused.stderr
