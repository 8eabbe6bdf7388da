"""docs/limits.md: what it calls refused is refused, by the real command; what it says is not there has no other test.

Each bold name of the section "Not supported" is here, so that a limit that has gone, or one that is new, is noticed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from errors.test_command_errors import refused

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text()
SECTION = PAGE[PAGE.index("## Not supported") : PAGE.index("## What")]
KEYS = (
    "--data.source",
    "corpus.txt",
    "--data.seq_len",
    "32",
    "--train.steps",
    "1",
    "--train.global_batch",
    "4",
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 257,
}
IMAGES = {
    "role": "user",
    "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}],
}
CHAT = {"messages": [IMAGES, {"role": "assistant", "content": "A cat."}]}


def model(kind: str, **sizes: Any) -> tuple[str, str]:
    return "--model.config", json.dumps({"model_type": kind, **(sizes or SIZES)})


# Name on the page -> (arguments, how the refusal begins), one or more.
REFUSALS: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "Pipeline parallelism": [(("--mesh.pp", "2"), "unknown key mesh.pp\n")],
    "TPUs": [
        (("--mesh.device", device), f"mesh.device = {device} is not accepted (command line)\n")
        for device in ("tpu", "mps", "xpu")
    ],
    "Models other than causal language models": [
        (
            ("--mesh.dp", "1", *model("t5", vocab_size=257)),
            "transformers has no causal language model of type 't5'",
        )
    ],
    "tp for architectures without a plan": [
        (
            ("--mesh.dp", "1", "--mesh.tp", "2", *model("stablelm")),
            "mesh.tp = 2, but transformers has no tensor-parallel plan for 'stablelm'\n",
        )
    ],
    "cp for architectures that keep their own attention": [
        (
            (
                "--mesh.cp",
                "2",
                *model("bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=257),
            ),
            "mesh.cp = 2, but 'bloom' keeps its own attention: ",
        )
    ],
    "Documents": [
        (
            (
                *("--mesh.dp", "1", "--data.document_mask", "true"),
                *model(
                    "openai-gpt", n_embd=32, n_layer=1, n_head=4, vocab_size=257, n_positions=64
                ),
            ),
            "data.document_mask = true, but 'openai-gpt' makes its masks itself, for whole rows\n",
        )
    ],
    "Models that see both sides of a token": [
        (("--mesh.dp", "1", *model("bert")), "the model 'bert' is not causal: ")
    ],
    "More local ranks than the machine has room for": [
        (
            ("--mesh.dp", "4096", "--mesh.device", "cpu", "--train.global_batch", "4096"),
            "mesh.dp x mesh.cp x mesh.tp = 4096, but this machine has room for ",
        )
    ],
    "Rows longer than the model has positions": [
        (
            ("--mesh.dp", "1", "--data.seq_len", "2049", *model("llama")),
            "data.seq_len = 2049, but the model supports at most 2048 positions\n",
        )
    ],
    "Preferences": [
        (("--train.objective", "ppo"), "train.objective = ppo is not accepted (command line)\n")
    ],
    "Images and audio": [
        (
            (
                "--mesh.dp",
                "1",
                "--data.source",
                "images.jsonl",
                "--data.chat_template",
                str(ROOT / "examples/sft/chat.jinja"),
            ),
            "images.jsonl, line 1: messages[0]: the content is a list, not text\n"
            "  expected: text (images and audio are not read)\n",
        )
    ],
    "Text at an address": [
        (
            ("--data.source", f"{scheme}://host/a.jsonl"),
            f"data.source = '{scheme}://host/a.jsonl' is an address: ",
        )
        for scheme in ("az", "https")
    ],
    "float16": [
        (("--model.dtype", "float16"), "model.dtype = float16 is not accepted (command line)\n")
    ],
}
# Name on the page -> the test that holds it.
ELSEWHERE = {
    "Masks that cannot be kept under cp": "errors/test_architecture_errors.py",
    "Weights that do not fit the model": "errors/test_weight_errors.py",
    "A tokenizer that is not the weights' own": "errors/test_pretrained_errors.py",
}
# Nothing to refuse: what is said is that there is no such thing.
NOT_THERE = {
    "Our tensor parallelism inside transformers.Trainer",
    "Windows",
    "Elastic world sizes during a run",
}


def test_each_limit_is_held_by_a_test() -> None:
    named = re.findall(r"^- \*\*(.+?)\*\*", SECTION, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == REFUSALS.keys() | ELSEWHERE.keys() | NOT_THERE
    for file in ELSEWHERE.values():
        assert (ROOT / "tests" / file).is_file()


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [case for cases in REFUSALS.values() for case in cases],
    ids=[
        f"{name}-{number}" for name, cases in REFUSALS.items() for number in range(len(cases))
    ],
)
def test_what_the_page_calls_refused_is_refused(
    arguments: tuple[str, ...], begins: str, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("hello world " * 400)
    (tmp_path / "images.jsonl").write_text(json.dumps(CHAT) + "\n")
    assert begins in refused(tmp_path, *KEYS, *arguments)


def test_a_gpu_is_spoken_of_as_it_was_tried() -> None:
    """Until a result of a device is kept in benchmarks/results, the README and the page of limits say that none is."""
    results = [
        path
        for path in (ROOT / "benchmarks").glob("results/*.json")
        if "cuda" in path.read_text()
    ]
    readme = (ROOT / "README.md").read_text()
    assert "exactly as it does on GPUs" not in readme
    if not results:
        assert (
            "[nothing in this documentation was measured on a GPU](docs/limits.md#not-run)"
            in readme
        )
        not_run = PAGE[PAGE.index("## Not run") :]
        assert "- **GPUs.**" in not_run and re.search(
            r"No figure in this documentation\s+was measured on a GPU", not_run
        )
