"""Packed conversations: every mesh follows one conversation at a time; runs of them are stopped, resumed, proved."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.reference import STRICT, TINY_LLAMA, require
from ranks.runs import command, curve, environment
from ranks.spawn import run_ranks
from threefold.check.compare import LOSS, compare_number, compare_tensors
from threefold.data.tokens import ByteTokenizer

pytestmark = pytest.mark.ranks

MODEL = {**TINY_LLAMA, "vocab_size": 257, "max_position_embeddings": 128}
SEQ_LEN, ROWS = 64, 4
# dp (replicas x shards), cp, tp
MESHES = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 2, 2)]
TEMPLATE = (
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
CONFIG = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2, initializer_range: 0.2}
data: {source: chat.jsonl, chat_template: chat.jinja, seq_len: 64}
train: {steps: 6, global_batch: 4}
log: {every: 1, sample_tokens: 0}
"""


def write(folder: Path, *, count: int) -> None:
    """Conversations of one and of two exchanges, short enough for several in a row."""
    (folder / "chat.jinja").write_text(TEMPLATE)
    with (folder / "chat.jsonl").open("w") as file:
        for i in range(count):
            asked = [
                {"role": "user", "content": "?" * (1 + i % 4)},
                {"role": "assistant", "content": f"a{i * 7 % 23}"},
            ]
            more = (
                [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": "b" * (i % 5)},
                ]
                if i % 3
                else []
            )
            file.write(json.dumps({"messages": asked + more}) + "\n")


def prepared(folder: Path, count: int) -> None:
    write(folder, count=count)
    made = command(
        folder, *("data", "prepare", "--data.source", "chat.jsonl", "--data.tokenizer", "bytes"),
        *("--data.chat_template", "chat.jinja", "--to", "store"),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose conversations fill at most `ROWS` rows, and a source of more for whole runs."""
    folder = tmp_path_factory.mktemp("conversations")
    prepared(folder, 5)
    write(folder, count=40)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def packed_on_mesh(sizes: tuple[int, int, int, int], prefix: str) -> Any:
    """Loss and gradients of the first step of one rank, over all rows of a store."""
    import torch

    from threefold.config.schema import Config
    from threefold.data.rows.concat import PADDING
    from threefold.data.rows.packing import Packing
    from threefold.data.store.store import TokenStore
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss

    replicate, shard, cp, tp = sizes
    rows = Packing(SEQ_LEN, None, document_mask=True).pack(TokenStore(prefix))
    assert rows.num_rows == ROWS
    batch = {
        name: torch.from_numpy(values) for name, values in rows.rows(np.arange(ROWS)).items()
    }
    assert int(batch["document_ids"].max()) >= 1, "no row has two conversations"
    batch["padding"] = batch["document_ids"] == PADDING
    mesh = init_mesh(replicate * shard, dp_shard=shard, cp=cp, tp=tp, device="cpu")
    config = Config.model_validate(
        {"model": {"config": MODEL}, "data": {"document_mask": True, "seq_len": SEQ_LEN}}
    )
    model = build(config, load.read_config(config.model), mesh)
    gradients: dict[str, Any] = {}

    def capture() -> None:
        for name, parameter in model.module.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            gradients[name] = (
                (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
                .clone()
                .numpy()
            )

    optimizer = build_optimizer(model.module, config.optimizer)
    step = TrainStep(model, optimizer, grad_clip=0.0, observe=capture)
    own = {name: values[mesh.dp_rank :: mesh.dp_size] for name, values in batch.items()}
    pieces = [
        {name: values[i : i + 1] for name, values in own.items()}
        for i in range(len(own["labels"]))
    ]
    return mean_loss(step.run(pieces, lr=1e-3), mesh), gradients


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one conversation at a time, in one process that knows nothing of rows."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = dict(MODEL)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    shown = command(
        folder, "data", "show", "--data.source", "store", "--data.tokenizer", "bytes", "--json"
    )
    conversations = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(conversations) == 5, shown.stderr
    count = sum(sum(each["loss_mask"]) for each in conversations)
    total = 0.0
    for each in conversations:
        ids, learnt = torch.tensor([each["ids"]]), torch.tensor(each["loss_mask"])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1][learnt[1:]]
        loss = F.cross_entropy(logits, ids[0, 1:][learnt[1:]], reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_packed_conversations_follow_one_at_a_time(
    sizes: tuple[int, int, int, int], folder: Path, alone: Any
) -> None:
    loss, expected = alone
    results = run_ranks(packed_on_mesh, math.prod(sizes), sizes, str(folder / "store/tokens"))
    found, gradients = results[0]
    differences = [
        compare_number(LOSS, found, loss),
        *compare_tensors(STRICT, gradients, expected),
    ]
    print(f"conversations {sizes}: {require(differences)}")
    assert all(result[0] == found for result in results), "ranks disagree about the loss"


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run of six steps on two data ranks, which saves after three."""
    done = command(
        folder,
        "train",
        "config.yaml",
        "--mesh.dp",
        "2",
        "--log.dir",
        "run",
        "--checkpoint.every",
        "3",
    )
    assert done.returncode == 0, done.stderr
    assert "  format chat (messages), trained on: assistant: " in done.stdout
    return folder / "run"


def test_head_names_the_format_of_each_source_of_a_mixture(folder: Path) -> None:
    (folder / "words.txt").write_text("some words " * 200)
    mixture = "{chats: {source: chat.jsonl, weight: 1}, words: {source: words.txt, weight: 1}}"
    (folder / "mixed.yaml").write_text(
        CONFIG.replace("source: chat.jsonl", f"mixture: {mixture}")
    )
    done = command(
        folder,
        "train",
        "mixed.yaml",
        "--mesh.dp",
        "1",
        "--train.steps",
        "1",
        "--log.dir",
        "mixed",
    )
    assert done.returncode == 0, done.stderr
    assert (
        "  format chats: chat (messages), trained on: assistant: " in done.stdout
        and "format words" not in done.stdout
    )


def test_labels_of_texts_are_refused_before_any_rank_starts_and_kept_for_a_mixture(
    folder: Path,
) -> None:
    (folder / "words.txt").write_text("some words " * 200)
    wrong = (
        "--data.source",
        "words.txt",
        "--data.template_variables",
        "{a: 1}",
        "--log.dir",
        "none",
    )
    refused = command(folder, "train", "config.yaml", "--mesh.dp", "2", *wrong)
    assert refused.returncode == 2 and not (folder / "none").exists(), refused.stderr
    assert refused.stderr.startswith(
        "data.chat_template = chat.jinja, data.template_variables = {a: 1}: words.txt is"
    )
    evaluated = (
        "--data.source",
        "words.txt",
        "--eval.source",
        "chat.jsonl",
        "--train.steps",
        "1",
        "--log.dir",
        "held",
    )
    accepted = command(folder, "train", "config.yaml", "--mesh.dp", "1", *evaluated)
    assert accepted.returncode == 0, accepted.stderr


def test_stopped_run_resumes_bit_for_bit(folder: Path, run: Path) -> None:
    for steps in ("3", "6"):
        schedule = ("--optimizer.schedule", "constant", "--checkpoint.every", "3")
        for name in ("cut", "whole") if steps == "6" else ("cut",):
            sizes = ("--mesh.dp", "2", "--train.steps", steps, "--log.dir", name, *schedule)
            done = command(folder, "train", "config.yaml", *sizes)
            assert done.returncode == 0, done.stderr
    assert curve(folder / "cut") == curve(folder / "whole") and len(curve(folder / "cut")) == 6
    weights = [folder / name / "checkpoints/step-00000006/state" for name in ("cut", "whole")]
    files = sorted(path.name for path in weights[0].glob("*.safetensors"))
    assert files and all(
        (weights[0] / name).read_bytes() == (weights[1] / name).read_bytes() for name in files
    )


def test_contents_are_proved_and_an_edited_target_is_found(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    proved = command(folder, "data", "audit", "run", "--contents")
    assert proved.returncode == 0 and "samples and tokens" in proved.stdout, proved.stderr
    copy = Path(shutil.copytree(folder, tmp_path / "copy", symlinks=True))
    (targets,) = copy.glob("cache/threefold/tokens/*/tokens.loss_mask")
    data = bytearray(targets.read_bytes())
    data[10] ^= 1
    stat = targets.stat()
    targets.write_bytes(data)
    os.utime(targets, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    failed = command(copy, "data", "audit", "run", "--contents")
    assert failed.returncode != 0 and "tokens.loss_mask has changed" in failed.stderr, (
        failed.stdout + failed.stderr
    )
    assert (
        "block 0 of 1 (bytes 0 to " in failed.stderr
        and "), read by rows 0, 1, 2, " in failed.stderr
    )


def test_targets_that_were_changed_with_their_hashes_are_no_proof(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    """The store has a fingerprint besides its hashes, and the run's record has digests of the labels."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy", symlinks=True))
    (targets,) = copy.glob("cache/threefold/tokens/*/tokens.loss_mask")
    data = bytearray(targets.read_bytes())
    data[10] ^= 1
    targets.write_bytes(data)
    targets.with_suffix(".blocks").unlink()
    failed = command(copy, "data", "audit", "run", "--contents")
    assert (
        failed.returncode != 0
        and ".idx and .loss_mask are not what tokens.json" in failed.stderr
    ), failed.stderr
    # With a fingerprint of its own, too, it is another store than the run's record names.
    from threefold.audit.proof import prove
    from threefold.audit.record import read
    from threefold.data.rows.packing import Packing
    from threefold.data.store.store import TokenStore
    from threefold.errors import RunError

    rows = Packing(SEQ_LEN, "best_fit", document_mask=True).pack(
        TokenStore(targets.with_suffix(""))
    )
    with pytest.raises(
        RunError, match=r"the tokens that dp rank . read are not those that the source has now"
    ):
        prove(read(copy / "run/audit.jsonl"), rows)


def test_rows_of_a_run_are_shown_as_they_are_trained(folder: Path, run: Path) -> None:
    shown = command(folder, "data", "show", "run", "--json")
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert rows and all(len(row["ids"]) == SEQ_LEN for row in rows), shown.stderr
    source = command(
        folder, *("data", "show", "--data.source", "chat.jsonl", "--data.tokenizer", "bytes", "--json"),
        *("--data.chat_template", "chat.jinja"),
    )  # fmt: skip
    documents = {
        tuple(each["ids"]): each["loss_mask"]
        for each in map(json.loads, source.stdout.splitlines())
    }
    seen = 0
    for row in rows:
        for number in {*row["documents"]} - {-1}:
            places = [
                place for place, document in enumerate(row["documents"]) if document == number
            ]
            ids = tuple(row["ids"][place] for place in places)
            assert documents[ids] == [row["loss_mask"][place] for place in places]
            seen += 1
    assert seen == 40


PROMPTS = ("--eval.sample", "[hi, 'b <|end|>']")
SAMPLED = ("--eval.source", "chat.jsonl", "--eval.every", "2", *PROMPTS, "--log.sample_tokens")


def samples(run: Path) -> list[dict[str, Any]]:
    """What was written after the prompts; the sample at the end of a run takes the place of a row's answer."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert lines[-1]["prompt"].endswith("<assistant>")
    return [line for line in lines if line["prompt"] in ("hi", "b <|end|>")]


def test_samples_are_written_at_each_evaluation_on_every_mesh(folder: Path) -> None:
    """The same texts from all meshes; steps are those of a run without samples, dropout and all."""
    base = (
        "train",
        "config.yaml",
        "--train.steps",
        "4",
        "--model.lora.r",
        "2",
        "--model.lora.dropout",
        "0.5",
    )
    quiet = command(folder, *base, "--mesh.dp", "1", "--log.dir", "unsampled")
    assert quiet.returncode == 0, quiet.stderr
    for mesh in ("1", "2"):
        sizes = [f"--mesh.{axis}={mesh}" for axis in ("dp", "dp_shard", "cp", "tp")]
        done = command(folder, *base, *sizes, *SAMPLED, "5", "--log.dir", f"sampled-{mesh}")
        assert done.returncode == 0, done.stderr
        lines = samples(folder / f"sampled-{mesh}")
        asked = [(step, prompt) for step in (2, 4) for prompt in ("hi", "b <|end|>")]
        assert [(line["step"], line["prompt"]) for line in lines] == asked
        assert all(isinstance(line["text"], str) for line in lines) and any(
            line["text"] for line in lines
        )
        assert done.stdout.count("  | hi -> ") == 2
    assert curve(folder / "sampled-1") == curve(folder / "unsampled")
    assert samples(folder / "sampled-1") == samples(folder / "sampled-2")


def test_samples_in_the_template_are_those_of_the_checkpoint_and_replayed_once(
    folder: Path,
) -> None:
    kept = ("--log.dir", "replayed", "--checkpoint.every", "2")
    done = command(
        folder,
        "train",
        "config.yaml",
        "--mesh.dp",
        "1",
        *SAMPLED,
        "5",
        *kept,
        "--train.steps",
        "4",
    )
    assert done.returncode == 0, done.stderr
    before = samples(folder / "replayed")
    from threefold.checkpoint.checkpoint_folder import CheckpointFolder
    from threefold.export.generation import generate_sample

    checkpoint = CheckpointFolder(folder / "replayed").newest()
    assert checkpoint is not None and checkpoint.step == 4
    prompt = [*b"<user>hi", 256, *b"\n<assistant>"]
    text = generate_sample(checkpoint, ByteTokenizer(), prompt, num_tokens=5)
    assert text.removeprefix("<user>hi\n<assistant>") == before[-2]["text"]
    shutil.rmtree(folder / "replayed/checkpoints/step-00000004")
    assert command(folder, "resume", "replayed").returncode == 0
    assert samples(folder / "replayed") == [*before, *before[-2:]]


TEXTS = (
    "--data.source",
    "words.txt",
    "--eval.source",
    "words.txt",
    "--data.chat_template",
    "null",
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("5", "--eval.source", "null"), "has no effect without eval.source"),
        (("0",), "has no effect without log.sample_tokens, which is 0"),
        (("5", "--eval.sample", "['']", *TEXTS), "has no token"),
        (("5000",), "tokens, and the model supports 2,048 positions"),
    ],
)
def test_samples_that_cannot_be_written_are_refused_before_training(
    folder: Path, changed: Any, said: str
) -> None:
    (folder / "words.txt").write_text("some words " * 200)
    arguments = (
        "train",
        "config.yaml",
        "--mesh.dp",
        "1",
        *SAMPLED,
        *changed,
        "--log.dir",
        "refused",
    )
    refused = command(folder, *arguments)
    assert refused.returncode == 2 and said in refused.stderr, refused.stderr
    assert not (folder / "refused/metrics.jsonl").exists()


def test_run_keeps_its_template_and_names_another_one(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    assert (run / "chat_template.jinja").read_text() == TEMPLATE
    (start,) = [
        line
        for line in map(json.loads, (run / "journal.jsonl").read_text().splitlines())
        if "mesh" in line
    ]
    assert (
        start["chat_template"] == hashlib.blake2b(TEMPLATE.encode(), digest_size=16).hexdigest()
    )
    copy = Path(shutil.copytree(folder, tmp_path / "copy", symlinks=True))
    config = (copy / "run/config.yaml").read_text().replace(str(folder), str(copy))
    (copy / "run/config.yaml").write_text(config)
    (copy / "chat.jinja").write_text(TEMPLATE.replace("<{{", "[{{"))
    refused = command(copy, "resume", "run", "--train.steps", "8")
    kept = copy / "run/chat_template.jinja"
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.startswith(
        f"the chat template {copy}/chat.jinja has changed since run/checkpoints/step-"
    )
    assert f"fix: --data.chat_template {kept}   (or " in refused.stderr
    exported = command(copy, "export", "run", "--to", "model")
    assert exported.returncode == 0, exported.stderr
    assert (copy / "model/chat_template.jinja").read_text() == TEMPLATE
    resumed = command(
        copy, "resume", "run", "--train.steps", "8", "--data.chat_template", str(kept)
    )
    assert resumed.returncode == 0, resumed.stderr
    kept.write_text(TEMPLATE + " ")
    for arguments in (("export", "run", "--to", "other"), ("sample", "run", "--chat")):
        failed = command(copy, *arguments)
        assert (
            failed.returncode != 0
            and "chat_template.jinja is not the chat template that" in failed.stderr
        )


def test_chat_answers_each_line_and_export_keeps_the_template(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "threefold", "sample", "run", "--chat", "--tokens", "5"],
        cwd=folder,
        env=environment(folder),
        input="a\nb <|end|>\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.returncode == 0 and len(said.stdout.splitlines()) >= 2, said.stderr
    done = command(folder, "export", "run", "--to", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<user>a<|end|>\n<assistant>"
