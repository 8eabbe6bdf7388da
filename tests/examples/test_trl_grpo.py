"""The loss of examples/loops/grpo.py is that of TRL's GRPOTrainer, from the same answers, before and after a step."""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(
        find_spec("trl") is None,
        reason="pip install --no-deps trl==1.16.0   (make test-examples does)",
    ),
]
GRPO = Path(__file__).parents[2] / "examples" / "loops" / "grpo.py"


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo", GRPO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _trainer(model: Any, folder: Path, example: Any) -> Any:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from threefold.data.tokens import byte_backend

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), eos_token="<|end|>", pad_token="<|end|>"
    )
    config = GRPOConfig(
        output_dir=str(folder),
        loss_type="bnpo",  # the mean over the tokens of a batch, which is one here
        beta=0.0,
        epsilon=example.EPSILON,
        num_generations=example.ANSWERS,
        per_device_train_batch_size=example.ANSWERS,
        max_completion_length=example.NEW,
        **{
            "bf16": False,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
        },
    )
    rows = Dataset.from_list([{"prompt": "a"}] * example.ANSWERS)
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda **_: [0.0],
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def test_a_loss_is_that_of_trl(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import threefold

    example = _example()
    mesh = threefold.init_mesh()
    model = threefold.load_model(config=example.LLAMA, mesh=mesh)
    step = threefold.TrainStep(model, loss=example.loss, loss_on="log_probabilities", lr=1e-2)
    batches = [example.rollout(model, number) for number in range(2)]
    own, theirs = [], []
    for _ in range(3):
        alone = LlamaForCausalLM(LlamaConfig(**example.LLAMA))
        alone.load_state_dict(
            {name: values.clone() for name, values in model.state_dict().items()}
        )
        trainer = _trainer(alone.train(), tmp_path, example)
        rows = {
            name: torch.cat([batch[name] for batch in batches])
            for name in batches[0]
            if name != "score"
        }
        written = slice(example.PROMPT - 1, -1)  # the places of labels that are answers
        inputs = {
            "prompt_ids": rows["input_ids"][:, : example.PROMPT],
            "prompt_mask": torch.ones_like(rows["input_ids"][:, : example.PROMPT]),
            "completion_ids": rows["input_ids"][:, example.PROMPT :],
            "completion_mask": (rows["labels"][:, written] != -100).long(),
            "advantages": rows["advantages"][:, 0],
            "old_per_token_logps": rows["old"][:, written],
        }
        theirs.append(float(trainer._compute_loss(alone, inputs)))
        own.append(
            step(
                [
                    {name: each for name, each in batch.items() if name != "score"}
                    for batch in batches
                ]
            ).loss
        )
    assert own == pytest.approx(theirs, abs=1e-5)
    assert len({round(each, 3) for each in own}) == 3  # the ratio is not 1 any more
    mesh.close()
