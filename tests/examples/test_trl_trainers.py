"""TRL's Trainers composed with ours: in both orders of the classes, on one and two ranks, as TRL in one process.

Rows that the ranks do not divide, and those that do not fill an evaluation, are where TRL aborts on several ranks
(losses that gather rows) or reports a mean of means.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ranks.huggingface_cases import join_launcher, on_ranks

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(
        find_spec("trl") is None,
        reason="pip install --no-deps trl==1.16.0   (make test-examples does)",
    ),
]
SIZES = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
ROWS, HELD_OUT, GLOBAL_BATCH = 15, 7, 4
KINDS = ("SFT", "DPO", "Reward")
ORDERS = ("ours last", "ours first")


def rows_of(kind: str, size: int) -> list[dict[str, str]]:
    asked = [f"{'what is it ' * (1 + row % 3)}{row}?" for row in range(size)]
    if kind == "SFT":
        return [
            {"prompt": each, "completion": f" it is {row}."} for row, each in enumerate(asked)
        ]
    answers = [
        {"chosen": f"{each} it is {row}.", "rejected": f"{each} no"}
        for row, each in enumerate(asked)
    ]
    if kind == "Reward":
        return answers
    return [
        {"prompt": each, **{name: text.removeprefix(each) for name, text in pair.items()}}
        for each, pair in zip(asked, answers, strict=True)
    ]


def save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from threefold.data.tokens import byte_backend

    torch.manual_seed(1)
    LlamaForCausalLM(
        LlamaConfig(**SIZES, **HEADS, eos_token_id=256, pad_token_id=256)
    ).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.save_pretrained(folder)


def model_of(kind: str, folder: str) -> Any:
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(2)  # of the reward head
    if kind == "Reward":
        return LlamaForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trained(
    kind: str, order: str, folder: str, batch_size: int, accumulation: int, eval_batch: int
) -> Any:
    """(loss and gradient norm of each step, evaluation loss)."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    from threefold.integrations.huggingface import Trainer

    join_launcher()
    base = getattr(trl, f"{kind}Trainer")
    bases = {"alone": (base,), "ours last": (base, Trainer), "ours first": (Trainer, base)}[
        order
    ]
    args = getattr(trl, f"{kind}Config")(
        output_dir=f"{folder}/{kind}-{order}-{batch_size}-{accumulation}-{os.environ.get('WORLD_SIZE', 1)}",
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=eval_batch,
        gradient_accumulation_steps=accumulation,
        **{
            "num_train_epochs": 2,
            "logging_steps": 1,
            "optim": "sgd",
            "learning_rate": 0.1,
            "max_length": 128,
        },
        **{
            "lr_scheduler_type": "constant",
            "train_sampling_strategy": "sequential",
            "save_strategy": "no",
        },
        **{
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
        },
    )
    trainer = type("Composed", bases, {})(
        model=model_of(kind, f"{folder}/model"),
        args=args,
        train_dataset=Dataset.from_list(rows_of(kind, ROWS)),
        eval_dataset=Dataset.from_list(rows_of(kind, HELD_OUT)),
        processing_class=AutoTokenizer.from_pretrained(f"{folder}/model"),
    )
    trainer.train()
    curve = [
        (line["loss"], line["grad_norm"])
        for line in trainer.state.log_history
        if "grad_norm" in line
    ]
    return curve, trainer.evaluate()["eval_loss"]


def all_of_them(folder: str, world: int) -> dict[str, Any]:
    cases = [(kind, order, GLOBAL_BATCH // world, 1) for kind in KINDS for order in ORDERS]
    cases += [(kind, "ours first", GLOBAL_BATCH // world // 2, 2) for kind in KINDS]
    return {json.dumps(case): trained(*case[:2], folder, *case[2:], 2) for case in cases}


# On two ranks every line of the composition runs; one process, where nothing is gathered, is a long case.
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_composed_trainers_are_trl_in_one_process(num_ranks: int, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    # The evaluation of all rows in one batch has the one mean.
    alone = {
        kind: trained(kind, "alone", str(tmp_path), GLOBAL_BATCH, 1, HELD_OUT) for kind in KINDS
    }
    for of_rank in on_ranks(all_of_them, num_ranks, str(tmp_path), num_ranks):
        for case, (curve, measured) in of_rank.items():
            wanted, wanted_measured = alone[json.loads(case)[0]]
            assert len(curve) == 8, case
            for step, (found, exact) in enumerate(zip(curve, wanted, strict=True), start=1):
                assert found[0] == pytest.approx(exact[0], abs=1e-4), (case, step)
                assert found[1] == pytest.approx(exact[1], rel=1e-3, abs=1e-5), (case, step)
            assert measured == pytest.approx(wanted_measured, abs=1e-5), case


@pytest.mark.parametrize("order", ORDERS)
def test_arguments_of_trls_constructor_reach_it(order: str, tmp_path: Path) -> None:
    import peft
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    from threefold.errors import ConfigError
    from threefold.integrations.huggingface import Trainer

    save_model(tmp_path / "model")
    quiet = {
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    args = trl.SFTConfig(output_dir=str(tmp_path), max_steps=1, max_length=64, **quiet)
    bases = (trl.SFTTrainer, Trainer) if order == "ours last" else (Trainer, trl.SFTTrainer)
    trainer = type("Composed", bases, {})(
        model=str(tmp_path / "model"),
        args=args,
        train_dataset=Dataset.from_list(rows_of("SFT", ROWS)),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "model"),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]),
    )
    trainer.train()
    assert isinstance(trainer.model, peft.PeftModel)
    bases = (trl.GRPOTrainer, Trainer) if order == "ours last" else (Trainer, trl.GRPOTrainer)
    with pytest.raises(ConfigError, match="the Trainer is composed with TRL's GRPOTrainer"):
        type("Composed", bases, {})(
            model=str(tmp_path / "model"),
            args=trl.GRPOConfig(output_dir=str(tmp_path), **quiet),
            train_dataset=Dataset.from_list([{"prompt": "what is it"}] * 8),
            reward_funcs=lambda completions, **_: [1.0] * len(completions),
        )
