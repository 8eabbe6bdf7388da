"""Checkpoints that DeepSpeed itself has written and made universal become runs: weights, moments, and the next step."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ranks.keeping import CORPUS, write_corpus
from ranks.runs import command, environment
from threefold.checkpoint.checkpoint_folder import find
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import read_whole

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed==0.19.8 hjson py-cpuinfo msgpack "
        "einops ninja   (make test-examples does)",
    ),
]
LLAMA = (
    '{"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}'
)
# Two ranks, by torchrun: three steps on rows of their own, a save, and a step on the rows that a run begins with.
PROGRAM = """
import json, os, sys
import deepspeed, torch
from transformers import AutoConfig, AutoModelForCausalLM

# Its operations for CPUs would be compiled first, for a minute.
deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
stage, out, architecture = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
matrices = {"params": [each for each in model.parameters() if each.ndim >= 2], "weight_decay": 0.1}
vectors = {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0}
optimizer = torch.optim.AdamW([matrices, vectors], lr=1e-3, betas=(0.9, 0.95))
settings = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
settings |= {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
text = open("corpus.txt", "rb").read()
rank = int(os.environ["RANK"])
for number in (1, 2, 3, 0):
    start = (number * 4 + rank * 2) * 16
    tokens = torch.tensor(list(text[start : start + 33]))
    logits = engine(input_ids=tokens[:-1].view(2, 16)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
    engine.backward(loss)
    engine.step()
    if number == 3:
        engine.save_checkpoint(out, tag="after-3")
engine.save_checkpoint(out, tag="after-4")
"""


def _run(folder: Path, *words: str) -> None:
    environ = {**environment(folder), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeed_has_written_goes_on_with_its_next_step(
    stage: int, tmp_path: Path
) -> None:
    import torch

    (tmp_path / "program.py").write_text(PROGRAM)
    write_corpus(tmp_path)
    assert len(CORPUS) > 16 * 16
    torchrun = (
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    _run(tmp_path, *torchrun, "program.py", str(stage), "zero", LLAMA)
    keys = [
        "--model.config",
        LLAMA,
        "--data.source",
        "corpus.txt",
        "--data.tokenizer",
        "bytes",
        "--data.seq_len",
        "16",
    ]
    keys += [
        "--train.global_batch",
        "4",
        "--train.steps",
        "4",
        "--log.sample_tokens",
        "0",
        "--mesh.device",
        "cpu",
    ]
    keys += [
        "--train.grad_clip",
        "0",
        "--data.shuffle",
        "false",
        "--optimizer.lr",
        "1e-3",
        "--mesh.dp",
        "1",
    ]
    keys += ["--optimizer.schedule", "constant", "--optimizer.warmup_steps", "0"]
    # As DeepSpeed saves it, it is refused, with what makes it universal.
    refused = command(tmp_path, "import", "zero/after-3", "--to", "run", *keys)
    assert refused.returncode == 2, refused.stderr
    assert (
        "zero/after-3 is a checkpoint of DeepSpeed's ZeRO: pickles of DeepSpeed's own classes"
        in refused.stderr
    )
    convert, _, again = (
        refused.stderr.split("fix: python ")[1].strip().partition("; threefold ")
    )
    for step in (3, 4):
        _run(tmp_path, *shlex.split(convert.replace("after-3", f"after-{step}")))
    made = command(tmp_path, *shlex.split(again), "--to", "run", *keys)
    assert made.returncode == 0, made.stderr
    assert (
        "run: step 3, 21 weights and their moments, by the names of transformers" in made.stdout
    )
    done = command(tmp_path, "resume", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    # What DeepSpeed has after its own fourth step.
    next_step = tmp_path / "next"
    assert command(tmp_path, "import", "zero", "--to", str(next_step), *keys).returncode == 0
    held = [Index.read(find(each).state).entries for each in (tmp_path / "run", next_step)]
    assert held[0].keys() - held[1].keys() == {"random.cpu.0"} and len(held[1]) == 4 * 21
    for name in held[1]:
        ours, theirs = (
            read_whole(find(place).state, entries[name])
            for place, entries in zip((tmp_path / "run", next_step), held, strict=True)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
