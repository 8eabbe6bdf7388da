"""Fine-tuning follows TRL's SFTTrainer and DPOTrainer on one process: the same losses, step by step, packed or not."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks.runs import command, metrics
from threefold.data.rows.packing import Packing
from threefold.data.store.open_source import open_store
from threefold.data.text.source import Source
from threefold.data.tokens import load_tokenizer

pytestmark = pytest.mark.examples

STEPS, STEPS_ON_PAIRS, LR, TOLERANCE = 5, 10, 1e-3, 1e-5
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 257,
    "initializer_range": 0.2,
}
TEMPLATE = (
    "{%- for message in messages -%}<{{ message.role }}>{%- if message.role == 'assistant' -%}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{%- else -%}{{ message.content }}{{ eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
ASSISTANT = {"assistant_only_loss": True}
PACKED = {"packing": True, "packing_strategy": "bfd", "padding_free": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer and chat template, conversations, and prompts with completions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from threefold.data.tokens import byte_backend

    folder = tmp_path_factory.mktemp("trl")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=256))
    model.save_pretrained(folder / "model")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    asked = [f"{'what is it ' * (1 + i % 3)}{i}?" for i in range(8)]
    chats = [
        [{"role": "user", "content": each}, {"role": "assistant", "content": f"it is {i}"}]
        * (1 + i % 2)
        for i, each in enumerate(asked)
    ]
    pairs = [{"prompt": each, "completion": f" it is {i}."} for i, each in enumerate(asked)]
    answers = [
        {"prompt": each, "chosen": f" it is {i}.", "rejected": f" no{'!' * (1 + i % 5)}"}
        for i, each in enumerate(asked)
    ]
    for name, rows in (
        ("chat", [{"messages": each} for each in chats]),
        ("pairs", pairs),
        ("answers", answers),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def losses_of_trl(
    folder: Path, source: str, settings: dict[str, Any], kind: str = "SFT"
) -> list[float]:
    """The loss of each step; every step reads the whole source."""
    trl = pytest.importorskip(
        "trl", reason="pip install --no-deps trl==1.16.0   (make test-examples does)"
    )
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found: list[float] = []

    class Recorded(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            found.append(float(loss))
            return loss

    rows = [json.loads(line) for line in (folder / source).read_text().splitlines()]
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(rows),
        max_steps=STEPS if kind == "SFT" else STEPS_ON_PAIRS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        **{
            "bf16": False,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
        },
        **settings,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    Recorded(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    ).train()
    return found


def losses_of_threefold(
    folder: Path,
    source: str,
    packing: str,
    seq_len: int,
    run: str,
    steps: int = STEPS,
    **more: Any,
) -> list[float]:
    """The loss of each step; every step reads the whole source."""
    store = open_store(
        Source(str(folder / source)),
        tokenizer=load_tokenizer(str(folder / "model")),
        cache=folder,
    )
    rows = Packing(seq_len, packing, document_mask=True).pack(store)
    keys = {
        **{
            "model.name_or_path": "model",
            "data.source": source,
            "data.seq_len": seq_len,
            "data.packing": packing,
        },
        **{
            "optimizer.lr": LR,
            "optimizer.schedule": "constant",
            "optimizer.warmup_steps": 0,
            "mesh.dp": 1,
        },
        **{"optimizer.weight_decay": 1e-12, "log.every": 1, "log.sample_tokens": 0},
        **more,
    }
    words = [
        "train",
        *(part for key, value in keys.items() for part in (f"--{key}", str(value))),
    ]
    sizes = (
        "--train.steps",
        str(steps),
        "--train.global_batch",
        str(rows.num_rows),
        "--log.dir",
        run,
    )
    done = command(folder, *words, *sizes)
    assert done.returncode == 0, done.stderr
    return [line["loss"] for _, line in sorted(metrics(folder / run).items())]


@pytest.mark.parametrize(
    ("source", "settings", "packing", "seq_len"),
    [
        ("chat.jsonl", ASSISTANT, "none", 256),
        ("chat.jsonl", ASSISTANT, "best_fit", 256),
        ("chat.jsonl", {**ASSISTANT, **PACKED}, "best_fit", 256),
        ("pairs.jsonl", {"completion_only_loss": True}, "none", 128),
        ("pairs.jsonl", {"completion_only_loss": True, **PACKED}, "best_fit", 256),
    ],
    ids=[
        "assistant",
        "assistant against packed",
        "both packed",
        "completion",
        "completion packed",
    ],
)
def test_losses_are_those_of_trl(
    folder: Path,
    source: str,
    settings: dict[str, Any],
    packing: str,
    seq_len: int,
    request: pytest.FixtureRequest,
) -> None:
    expected = losses_of_trl(folder, source, {"max_length": 256, **settings})
    found = losses_of_threefold(
        folder, source, packing, seq_len, request.node.name.replace(" ", "-")
    )
    print(
        "differences:", [f"{a - b:.1e}" for a, b in zip(found, expected, strict=True)], expected
    )
    assert (
        len(expected) == STEPS
        and expected[-1] < expected[0]
        and all(map(math.isfinite, expected))
    )
    assert found == pytest.approx(expected, abs=TOLERANCE)


SMOOTHED = 0.2
# Our settings, and TRL's.
LOSSES_ON_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({"loss": "sigmoid", "beta": 0.1}, {"loss_type": ["sigmoid"], "beta": 0.1}),
    "ipo": ({"loss": "ipo", "beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}),
    "hinge": ({"loss": "hinge", "beta": 0.02}, {"loss_type": ["hinge"], "beta": 0.02}),
    # TRL smooths no labels of its sigmoid loss. Its `robust` loss R is made of the loss S and that of the swapped
    # pair S': R = ((1 - e) S - e S') / (1 - 2 e). So (1 - e) S + e S' = 2 (1 - e) S - (1 - 2 e) R.
    "smoothed": (
        {"label_smoothing": SMOOTHED},
        {
            **{"loss_type": ["sigmoid", "robust"], "label_smoothing": SMOOTHED, "beta": 0.1},
            "loss_weights": [2 * (1 - SMOOTHED), 2 * SMOOTHED - 1],
        },
    ),
}


@pytest.fixture(scope="module")
def losses_on_pairs_of_trl(folder: Path) -> Callable[[str], list[float]]:
    """TRL's losses by their name, trained once: they do not depend on how we pack."""

    @functools.cache
    def of(name: str) -> list[float]:
        return losses_of_trl(
            folder, "answers.jsonl", {"max_length": 256, **LOSSES_ON_PAIRS[name][1]}, "DPO"
        )

    return of


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("name", LOSSES_ON_PAIRS)
def test_losses_on_pairs_are_those_of_trl(
    folder: Path,
    name: str,
    packing: str,
    losses_on_pairs_of_trl: Callable[[str], list[float]],
    request: pytest.FixtureRequest,
) -> None:
    expected = losses_on_pairs_of_trl(name)
    own, _ = LOSSES_ON_PAIRS[name]
    keys = {"train.objective": "dpo", **{f"dpo.{name}": value for name, value in own.items()}}
    run = request.node.name.replace(" ", "-")
    found = losses_of_threefold(
        folder, "answers.jsonl", packing, 256, run, STEPS_ON_PAIRS, **keys
    )
    print(
        "differences:", [f"{a - b:.1e}" for a, b in zip(found, expected, strict=True)], expected
    )
    assert (
        len(expected) == STEPS_ON_PAIRS
        and expected[-1] < expected[0]
        and all(map(math.isfinite, expected))
    )
    assert found == pytest.approx(expected, abs=TOLERANCE)
