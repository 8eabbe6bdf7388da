"""Pairs of answers in whole commands: trained, evaluated, resumed and proved; refused where nothing compares them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ranks.reference import compare_curves, require
from ranks.runs import CONFIG, command, curve, metrics
from threefold.audit import record, row_losses

pytestmark = pytest.mark.ranks

ONE = ("--mesh.dp", "1", "--mesh.cp", "1", "--mesh.tp", "1", "--mesh.device", "cpu")
DPO = ("--train.objective", "dpo")
NUM_PAIRS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {
            "prompt": f"question {number}:",
            "chosen": "yes " * (1 + number % 4),
            "rejected": f"no {number}",
        }
        for number in range(NUM_PAIRS)
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(
        CONFIG.replace("{source: corpus, seq_len: 32}", "{source: p.jsonl, seq_len: 96}")
    )
    return tmp_path


def lines_of_evaluation(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in line if key != "time"}
        for line in lines
        if "eval_loss" in line
    ]


def test_pairs_are_refused_before_a_rank_starts(folder: Path) -> None:
    for mesh in (("--mesh.dp", "2", *ONE[2:]), ONE):
        refused = command(folder, "train", "config.yaml", *mesh, "--log.dir", "run")
        assert refused.returncode == 2
        assert (
            "data.source has pairs of answers (preference): rejected answers would be trained on"
            in refused.stderr
        )
        assert (
            "fix: --train.objective dpo   (to train on the chosen answers alone: --data.format"
            in refused.stderr
        )
        assert not (folder / "run").exists()
    (folder / "t.txt").write_text("some text\n" * 50)
    text = command(
        folder, "train", "config.yaml", *ONE, *DPO, "--data.source", "t.txt", "--log.dir", "run"
    )
    assert text.returncode == 2 and not (folder / "run").exists()
    assert "train.objective = dpo, but data.source has rows of the format text" in text.stderr
    fixed = (
        "--data.format",
        "prompt_completion",
        "--data.fields",
        "{completion: chosen}",
        "--train.steps",
        "2",
    )
    done = command(folder, "train", "config.yaml", *ONE, *fixed)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = command(folder, "verify", "config.yaml", *ONE)
    assert (
        verified.returncode == 2 and "rejected answers would be trained on" in verified.stderr
    )


def test_a_run_on_pairs_is_evaluated_resumed_and_proved(folder: Path) -> None:
    options = (*DPO, "--eval.source", "p.jsonl", "--eval.every", "4", "--checkpoint.every", "4")
    done = command(
        folder, "train", "config.yaml", *ONE, *options, "--train.steps", "8", "--log.dir", "run"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"in {NUM_PAIRS} pairs, " in done.stdout
        and "format preference (chosen, rejected, prompt)" in done.stdout
    )
    assert done.stdout.count("reference: computed once") == 1, (
        "the evaluation has the same rows"
    )
    first = metrics(folder / "run")[1]
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-6) and first[
        "reward_margin"
    ] == pytest.approx(0, abs=1e-5)
    evaluated = lines_of_evaluation(folder / "run")
    assert [line["eval_pairs"] for line in evaluated] == [NUM_PAIRS] * 2
    assert evaluated[-1]["eval_reward_margin"] == pytest.approx(
        evaluated[-1]["eval_reward_chosen"] - evaluated[-1]["eval_reward_rejected"]
    )
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"] < 0.6931
    again = command(folder, "eval", "run")
    assert again.returncode == 0, again.stdout + again.stderr
    assert (
        f"loss {evaluated[-1]['eval_loss']:.6f}  margin " in again.stdout
        and f"{NUM_PAIRS} pairs" in again.stdout
    )
    # From step 4: bit for bit on the same mesh, the same rows on another one; other runs compute no reference again.
    part = (
        "--checkpoint.resume",
        str(folder / "run/checkpoints/step-00000004"),
        "--train.steps",
        "8",
    )
    same = command(folder, "train", "config.yaml", *ONE, *options, *part, "--log.dir", "same")
    assert same.returncode == 0, same.stdout + same.stderr
    assert "reference: computed" not in same.stdout
    assert curve(folder / "same") == curve(folder / "run")[4:]
    shutil.rmtree(folder / "cache/threefold/references")
    mesh = ("--mesh.dp", "2", "--mesh.cp", "1", "--mesh.tp", "2", "--mesh.device", "cpu")
    other = command(
        folder, "train", "config.yaml", *mesh, *options, *part, "--log.dir", "other"
    )
    assert other.returncode == 0, other.stdout + other.stderr
    assert "reference: computed" not in other.stdout, "the run that is resumed keeps its own"
    require(compare_curves(curve(folder / "other"), curve(folder / "run")[4:]))
    for name in ("run", "other"):
        losses = row_losses.read(folder / name, record.read(folder / name / record.FILE))
        for step, line in metrics(folder / name).items():
            rows = losses.of(step)
            assert rows is not None
            assert rows.sums.sum() / rows.counts.sum() == pytest.approx(
                line["loss"], rel=1e-6
            ), f"step {step}"
    (kept,) = (folder / "run/reference").iterdir()
    assert [path.read_bytes() for path in (folder / "other/reference").iterdir()] == [
        kept.read_bytes()
    ]
    changed = command(folder, "resume", "run", "--dpo.beta", "0.2", "--train.steps", "10")
    assert changed.returncode == 2 and "dpo.beta = 0.2, but" in changed.stderr
    content = bytearray(kept.read_bytes())
    content[-3] ^= 1
    kept.write_bytes(content)
    damaged = command(folder, "resume", "run", "--train.steps", "10")
    assert (
        damaged.returncode == 2 and f"run/reference/{kept.name} has changed" in damaged.stderr
    ), damaged.stderr
    kept.unlink()
    # A cache that cannot be written: the run keeps its own.
    (folder / "cache/threefold/references").touch()
    mended = command(folder, "resume", "run", "--train.steps", "10")
    assert mended.returncode == 0 and "reference: computed once" in mended.stdout, (
        mended.stdout + mended.stderr
    )
    assert "reference: not kept in " in mended.stdout and kept.exists()
    proved = command(folder, "data", "audit", "run", "--contents")
    assert proved.returncode == 0 and "steps 1 to 10, 2 starts" in proved.stdout, (
        proved.stdout + proved.stderr
    )


@pytest.mark.examples
def test_verify_compares_pairs_with_one_process(folder: Path) -> None:
    mesh = ("--mesh.dp", "1", "--mesh.cp", "2", "--mesh.tp", "1", "--mesh.device", "cpu")
    for more in ((), ("--model.lora.r", "4", "--dpo.loss", "ipo")):
        done = command(folder, "verify", "config.yaml", "--steps", "2", *mesh, *DPO, *more)
        assert done.returncode == 0 and "the mesh follows the single process" in done.stdout, (
            done.stdout + done.stderr
        )
        assert ("reference: computed once" in done.stdout) is not bool(more)


def test_a_reference_of_other_weights_is_refused(folder: Path) -> None:
    """A run that is resumed with another model would be compared with that; adapters have no file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=257, eos_token_id=256))
    model.save_pretrained(folder / "model")
    text = (folder / "config.yaml").read_text()
    start = text.index("  config: {")
    (folder / "config.yaml").write_text(
        f"{text[:start]}  name_or_path: model\n{text[text.index('data: ') :]}"
    )
    options = (*DPO, "--data.tokenizer", "bytes", "--data.allow_other_tokenizer", "true")
    command_line = ("train", "config.yaml", *ONE, *options, "--train.steps")
    done = command(folder, *command_line, "2", "--log.dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    adapted = command(folder, *command_line, "2", "--log.dir", "adapted", "--model.lora.r", "4")
    assert adapted.returncode == 0 and not (folder / "adapted/reference").exists(), (
        adapted.stderr
    )
    assert "reference: the initial model, without the adapters" in adapted.stdout
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] += 1e-3
    model.save_pretrained(folder / "model")
    refused = command(folder, *command_line, "4", "--log.dir", "run")
    assert refused.returncode == 2 and "other weights" in refused.stderr, (
        refused.stdout + refused.stderr
    )


def test_what_a_run_reads_of_pairs_is_shown_and_proved(folder: Path) -> None:
    options = (*DPO, "--eval.source", "p.jsonl", "--train.steps", "4", "--log.dir", "run")
    done = command(folder, "train", "config.yaml", *ONE, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"in {NUM_PAIRS} pairs, " in done.stdout
        and "format preference (chosen, rejected, prompt)" in done.stdout
    )
    again = command(folder, "resume", "run", "--train.steps", "8")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(curve(folder / "run")) == 8
    proved = command(folder, "data", "audit", "run", "--contents")
    assert proved.returncode == 0, proved.stderr
    assert "steps 1 to 8, 2 starts" in proved.stdout and "proved: " in proved.stdout
    rows = [
        json.loads(line)
        for line in command(folder, "data", "show", "run", "--json").stdout.splitlines()
    ]
    assert sum(len(row["sides"]) for row in rows) == 2 * NUM_PAIRS
    assert all(
        row["sides"] == ["chosen", "rejected"] * (len(row["sides"]) // 2) for row in rows
    )
    order = command(folder, "data", "order", "run", "--sample", "0", "--show")
    assert order.returncode == 0 and "  | question " in order.stdout
    # One token of the store: the proof names it.
    (store,) = (folder / "cache").glob("threefold/tokens/*/tokens.loss_mask")
    content = bytearray(store.read_bytes())
    content[7] ^= 1
    store.write_bytes(content)
    damaged = command(folder, "data", "audit", "run")
    assert damaged.returncode == 1 and "tokens.loss_mask has changed" in damaged.stderr, (
        damaged.stdout + damaged.stderr
    )
