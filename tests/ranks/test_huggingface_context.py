"""The Trainer on context ranks: rows cut, every mask kept; it follows a loop by hand over whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from ranks.huggingface_cases import VOCAB, arguments
from ranks.spawn import run_ranks
from ranks.test_huggingface_training import (
    GLOBAL_BATCH,
    RATE,
    SEED,
    assert_same_curve,
    curve_of,
)
from threefold.data.order.permutation import Permutation
from threefold.errors import ConfigError

pytestmark = pytest.mark.ranks

# 14 places do not divide among two ranks with head and tail: rows are filled up.
ROWS, LENGTH, EPOCHS = (19, 14, 2)


class Padded(Dataset[dict[str, Tensor]]):
    """Row i begins with i % 4 places of padding; behind them all but every fifth are targets."""

    def __init__(self) -> None:
        self.tokens = torch.randint(
            VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2)
        )

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) >= index % 4).long()
        labels = self.tokens[index].clone()
        labels[: index % 4 + 1] = -100  # what padding would predict
        labels[4::5] = -100
        return {"input_ids": self.tokens[index], "attention_mask": mask, "labels": labels}


def model_with_window() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "sliding_window": 5,
    }
    return MistralForCausalLM(MistralConfig(**sizes, **heads, attn_implementation="eager"))


def _loss_sum(model: Any, rows: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, labels.ne(-100).sum()


def _by_hand() -> tuple[list[tuple[float, float]], float]:
    model, rows = model_with_window(), Padded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    curve = []
    for epoch in range(EPOCHS):
        order = Permutation(ROWS, seed=SEED, epoch=epoch).at(np.arange(ROWS))
        for first in range(0, ROWS, GLOBAL_BATCH):
            batch = [
                rows[int(order[place])]
                for place in range(first, min(first + GLOBAL_BATCH, ROWS))
            ]
            total, count = _loss_sum(model, batch)
            optimizer.zero_grad()
            (total / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            curve.append(((total / count).item(), norm.item()))
    with torch.no_grad():
        total, count = _loss_sum(model, [rows[index] for index in range(ROWS)])
    return curve, (total / count).item()


def _train(folder: str, dp: int, cp: int) -> dict[str, Any]:
    import threefold
    from threefold.integrations.huggingface import Trainer

    threefold.init_mesh(dp=dp, cp=cp, device="cpu")
    seen: list[tuple[int, ...]] = []
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": GLOBAL_BATCH // (2 * dp),
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "logging_steps": 1,
        "logging_strategy": "steps",
        "data_seed": SEED,
        "num_train_epochs": EPOCHS,
    }
    trainer = Trainer(
        model_with_window(),
        arguments(folder, **settings),
        train_dataset=Padded(),
        eval_dataset=Padded(),
        compute_metrics=lambda found: seen.append(found.predictions.shape) or {},
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/model")
    with pytest.raises(ConfigError) as caught:
        trainer.model(
            input_ids=torch.zeros(1, 8, dtype=torch.long), inputs_embeds=torch.zeros(1, 8, 16)
        )
    assert str(caught.value).startswith(
        f"the model splits its rows among {cp} context ranks, and was given inputs_embeds\n"
        "  expected: input_ids, attention_mask, position_ids and labels: anything else would be ignored\n"
    )
    trainer.end()
    return {"curve": curve_of(trainer.state.log_history), "loss": loss, "seen": seen}


def test_context_ranks_follow_whole_rows(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    curve, loss = _by_hand()
    for dp, cp in ((1, 2), (2, 2)):
        folder = tmp_path / f"{dp}x{cp}"
        for found in run_ranks(_train, dp * cp, str(folder), dp, cp):
            assert_same_curve(found["curve"], curve)
            assert found["loss"] == pytest.approx(loss, abs=1e-4)
            assert found["seen"] == [(ROWS, LENGTH, VOCAB)]
    reloaded = AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    with torch.no_grad():
        total, count = _loss_sum(reloaded, [Padded()[index] for index in range(ROWS)])
    assert (total / count).item() == pytest.approx(loss, abs=1e-4)


def _refused(folder: str) -> str:
    import threefold
    from ranks.huggingface_cases import Reviews, classifier
    from threefold.integrations.huggingface import Trainer

    threefold.init_mesh(cp=2, device="cpu")
    with pytest.raises(ConfigError) as caught:
        Trainer(classifier(), arguments(folder), train_dataset=Reviews(4))
    return str(caught.value)


def test_model_whose_loss_is_no_sum_over_places_is_refused(tmp_path: Path) -> None:
    assert run_ranks(_refused, 2, str(tmp_path))[0] == (
        "threefold.init_mesh(cp=2), and the model is a BertForSequenceClassification\n"
        "  expected: a causal language model, whose loss is a sum over positions\n"
        "  fix: threefold.init_mesh(cp=1)"
    )


def _leaking_rows(folder: str) -> str:
    """Rows see one another where more than four are in a micro-batch: more than the reduced model's are probed with."""
    from transformers.models.mistral.modeling_mistral import MistralMLP

    import threefold
    from threefold.integrations.huggingface import Trainer

    plain = MistralMLP.forward

    def forward(module: Any, x: Tensor) -> Tensor:
        output = plain(module, x)
        return output + 0.1 * output.roll(1, dims=0) if len(output) > 4 else output

    MistralMLP.forward = forward  # type: ignore[method-assign]
    threefold.init_mesh(cp=2, device="cpu")
    settings = {"per_device_train_batch_size": 6, "learning_rate": RATE, "max_steps": 2}
    trainer = Trainer(
        model_with_window(),
        arguments(folder, **settings),
        train_dataset=Padded(),
        eval_dataset=Padded(),
    )
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.evaluate()
    try:
        trainer.train()
    except ConfigError as error:
        assert all(map(torch.equal, before, trainer.model.parameters()))
        return str(error)
    return "trained"


def test_its_own_forward_is_probed_before_the_first_step(tmp_path: Path) -> None:
    for said in run_ranks(_leaking_rows, 2, str(tmp_path)):
        assert said.startswith(
            "'mistral' lets a row see the other rows of its micro-batch, at its full size on"
        ), said
