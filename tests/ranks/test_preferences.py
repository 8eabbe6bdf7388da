"""Pairs of answers on every mesh: the loss of one process, and that of a loop written by hand; the reference kept."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from ranks.reference import STRICT, TINY_LLAMA, compare_curves, require
from ranks.spawn import run_ranks
from threefold.check.compare import compare_tensors

pytestmark = pytest.mark.ranks

MESHES = [
    {"dp": 2},
    {"dp": 2, "dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"dp": 2, "dp_shard": 2, "cp": 2, "tp": 2},
]
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.5},
    "smoothed": {"beta": 0.5, "label_smoothing": 0.2},
    "ipo": {"loss": "ipo", "beta": 0.3},
    "hinge": {"loss": "hinge", "beta": 2.0},
}
STEPS, ROWS, SEQ_LEN, LR = 3, 8, 64, 3e-3
MODEL = {**TINY_LLAMA, "vocab_size": 257}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder / "p.jsonl", 60)
    return folder


def write_pairs(path: Path, number: int) -> None:
    rows = [
        {
            "prompt": f"q{each}:",
            "chosen": "yes" * (1 + each % 4),
            "rejected": f"no{each * each}" * (1 + each % 2),
        }
        for each in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_in(folder: Path) -> Any:
    from threefold.data.rows.packing import Packing
    from threefold.data.store.open_source import open_store
    from threefold.data.text.source import Source
    from threefold.data.tokens import load_tokenizer

    store = open_store(
        Source(str(folder / "p.jsonl")),
        tokenizer=load_tokenizer("bytes"),
        cache=folder / "cache",
    )
    return Packing(SEQ_LEN, "best_fit", document_mask=True).pack(store)


def asked(kind: str, lora: bool = False) -> Any:
    from threefold.config.loading import validate

    model = {
        "config": MODEL,
        **({"lora": {"r": 4, "target_modules": "all-linear"}} if lora else {}),
    }
    train = {"objective": "dpo", "global_batch": ROWS, "micro_batch": 2}
    return validate(
        {"model": model, "train": train, "dpo": LOSSES[kind], "data": {"seq_len": SEQ_LEN}}
    )


def curve(
    mesh: Any,
    folder: Path,
    kind: str,
    cache: Path,
    *,
    lora: bool = False,
    checkpointing: str = "none",
) -> Any:
    """(numbers and measures of each step, gradients of the first, evaluation, lines said) of a loop on pairs."""
    import os

    import threefold
    from threefold.data.order.order import Order
    from threefold.data.sampling.loader import TokenLoader, evaluation_batches
    from threefold.run.dpo import evaluation_of, pairs_of
    from threefold.training.batches import micro_batches
    from threefold.training.numbers import mean_loss, mean_measures

    os.environ["XDG_CACHE_HOME"] = str(cache)
    config, rows = asked(kind, lora), rows_in(folder)
    adapters = {"r": 4, "target_modules": "all-linear"} if lora else None
    recomputed: Any = checkpointing
    model = threefold.load_model(
        config=MODEL,
        mesh=mesh,
        admission="off",
        lora=adapters,
        activation_checkpointing=recomputed,
    )
    said: list[str] = []
    pairs = pairs_of(config, model, rows, None, resumed=None, say=said.append)
    assert pairs is not None
    first: dict[str, Any] = {}

    def observe() -> None:
        if not first:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    grad: Any = parameter.grad
                    first[name] = (
                        (grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
                        .clone()
                        .numpy()
                    )

    step = threefold.TrainStep(
        model, loss=pairs.loss, loss_on="log_probabilities", lr=LR, observe=observe
    )
    order = Order(rows.num_rows, ROWS, seed=0, shuffle=True, tail="carry")
    loader = iter(
        TokenLoader(rows, order, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, document_mask=True)
    )
    numbers = []
    for _ in range(STEPS):
        result = step.run(micro_batches(next(loader), 2), lr=LR)
        numbers.append(
            [mean_loss(result, mesh), result.grad_norm.item(), *mean_measures(result, mesh)]
        )
    held_out = evaluation_batches(
        rows, rows_per_rank=3, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, document_mask=True
    )
    (loss_sum, count), measured = evaluation_of(model, pairs.loss).measured(held_out)
    return numbers, first, [loss_sum, count, *measured.values()], said


CASES: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in LOSSES},
    "lora": {"kind": "sigmoid", "lora": True},
    "recomputed": {"kind": "sigmoid", "checkpointing": "full"},
}


def _curves(sizes: dict[str, int], folder: Path, cache: Path) -> Any:
    import threefold

    mesh = threefold.init_mesh(**sizes)
    found = {name: curve(mesh, folder, cache=cache, **case) for name, case in CASES.items()}
    mesh.close()
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return run_ranks(_curves, 1, {}, folder, folder / "alone")[0]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh_follows_one_process(
    sizes: dict[str, int], alone: Any, folder: Path, tmp_path: Path
) -> None:
    num_ranks = math.prod(size for axis, size in sizes.items() if axis != "dp_shard")
    ranks = run_ranks(_curves, num_ranks, sizes, folder, tmp_path)
    for case, (numbers, gradients, evaluated, _) in alone.items():
        found_numbers, found_gradients, found_evaluated, _ = ranks[0][case]
        assert found_numbers[0] == pytest.approx(numbers[0], abs=2e-6, rel=2e-6), case
        for found, expected in zip(found_numbers, numbers, strict=True):
            assert found[2:] == pytest.approx(expected[2:], abs=1e-3), case
        require(compare_curves(found_numbers, numbers), case)
        require(compare_tensors(STRICT, found_gradients, gradients), case)
        assert found_evaluated[1] == evaluated[1] == 60, "each pair is counted once"
        assert found_evaluated == pytest.approx(evaluated, abs=1e-2), case
        assert all(
            rank[case][0] == found_numbers and rank[case][2] == found_evaluated
            for rank in ranks
        ), case


def _by_hand(folder: Path, kind: str) -> list[list[float]]:
    """Each document alone through transformers' model; losses as their papers write them."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    from threefold.config.loading import validate
    from threefold.data.order.order import Order
    from threefold.data.sampling.loader import TokenLoader

    torch.manual_seed(0)
    values = dict(MODEL)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    reference, rows, dpo = (
        copy.deepcopy(model),
        rows_in(folder),
        validate({"dpo": {}, "train": {}}).dpo,
    )
    dpo = dpo.model_copy(update=LOSSES[kind])
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) is matrix]}
        for matrix in (True, False)
    ]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.1, 0.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    loader = iter(
        TokenLoader(
            rows,
            Order(rows.num_rows, ROWS, seed=0, shuffle=True, tail="carry"),
            dp_rank=0,
            dp_size=1,
            document_mask=True,
        )
    )

    def gained(row: dict[str, Any], document: int) -> tuple[Any, int]:
        place = row["document_ids"] == document
        labels, found = row["labels"][place], []
        learnt = labels != -100
        for each in (model, reference):
            logits = each(input_ids=row["input_ids"][place][None], use_cache=False).logits[0]
            found.append(
                logits.log_softmax(-1)[learnt].gather(1, labels[learnt][:, None]).sum()
            )
        return found[0] - found[1].detach(), int(learnt.sum())

    numbers = []
    for _ in range(STEPS):
        batch, losses, rewards = next(loader), [], []
        for number in range(ROWS):
            row = {name: values[number] for name, values in batch.items()}
            for pair in range((int(row["document_ids"].max()) + 1) // 2):
                (chosen, chosen_tokens), (rejected, rejected_tokens) = (
                    gained(row, 2 * pair + k) for k in (0, 1)
                )
                margin = dpo.beta * (chosen - rejected)
                if dpo.loss == "hinge":
                    losses.append(torch.relu(1 - margin))
                elif dpo.loss == "ipo":
                    apart = chosen / chosen_tokens - rejected / rejected_tokens
                    losses.append((apart - 1 / (2 * dpo.beta)) ** 2)
                else:
                    e = dpo.label_smoothing
                    losses.append(-(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin))
                rewards.append([dpo.beta * chosen.item(), dpo.beta * rejected.item()])
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        first, second = (sum(each) / len(rewards) for each in zip(*rewards, strict=True))
        accuracy = sum(a > b for a, b in rewards) / len(rewards)
        numbers.append([loss.item(), norm.item(), first, second, first - second, accuracy])
    return numbers


@pytest.mark.parametrize("kind", LOSSES)
def test_one_process_follows_a_loop_written_by_hand(
    kind: str, alone: Any, folder: Path
) -> None:
    (expected,) = run_ranks(_by_hand, 1, folder, kind)
    for found, wanted in zip(alone[kind][0], expected, strict=True):
        assert found[0] == pytest.approx(wanted[0], abs=1e-5)
        assert found[1] == pytest.approx(wanted[1], rel=1e-3)
        assert found[2:5] == pytest.approx(wanted[2:5], abs=1e-4)
    assert alone[kind][0][-1][5] == pytest.approx(expected[-1][5], abs=0.05)
