"""What transformers' own tests ask of its Trainer about data order, evaluation and resuming, asked of ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import PretrainedConfig, PreTrainedModel, TrainerCallback

from ranks.huggingface_cases import Sentences, arguments, causal_model
from threefold.integrations.huggingface import Trainer


class Line(Dataset[dict[str, Any]]):
    """Points of y = 2 x + 3, with noise of its own."""

    def __init__(self, size: int = 64, labels: tuple[str, ...] = ("labels",)) -> None:
        random = np.random.default_rng(size)
        self.x = random.normal(size=size).astype(np.float32)
        self.ys = [
            (2 * self.x + 3 + random.normal(scale=0.1, size=size)).astype(np.float32)
            for _ in labels
        ]
        self._labels = labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": self.x[index],
            **{name: y[index] for name, y in zip(self._labels, self.ys, strict=True)},
        }


class LineConfig(PretrainedConfig):
    model_type = "line"

    def __init__(
        self,
        a: float = 0.0,
        b: float = 0.0,
        outputs: int = 1,
        noisy: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.a, self.b, self.outputs, self.noisy = a, b, outputs, noisy


class Fit(nn.Module):
    """a x + b, and its mean squared error."""

    def __init__(self, config: LineConfig) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.tensor(config.a)),
            nn.Parameter(torch.tensor(config.b)),
        )
        self.line, self.seen = config, []  # type: ignore[var-annotated]

    def forward(
        self, x: Tensor, labels: Tensor | None = None, labels_2: Tensor | None = None
    ) -> Any:
        y = self.a * x + self.b
        if self.line.noisy and self.training:
            y = y + 0.1 * torch.randn(()) + 0.1 * np.random.rand()
        self.seen += x.tolist()
        outputs = (y,) * self.line.outputs
        return outputs if labels is None else (nn.functional.mse_loss(y, labels), *outputs)


class PretrainedFit(PreTrainedModel):
    """The same as a model of transformers."""

    config_class = LineConfig
    base_model_prefix = "fit"
    forward = Fit.forward

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.a, self.b = (
            nn.Parameter(torch.tensor(config.a)),
            nn.Parameter(torch.tensor(config.b)),
        )
        self.line, self.seen = config, []
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The two numbers are given."""


def made(
    folder: Path,
    *,
    pretrained: bool = True,
    train: Any = None,
    evaluate: Any = None,
    **settings: Any,
) -> Trainer:
    names = ("a", "b", "outputs", "noisy")
    config = LineConfig(**{name: settings.pop(name) for name in names if name in settings})
    given = {
        name: settings.pop(name)
        for name in (
            "compute_metrics",
            "preprocess_logits_for_metrics",
            "callbacks",
            "data_collator",
        )
        if name in settings
    }
    model = PretrainedFit(config) if pretrained else Fit(config)
    args = arguments(
        str(folder), **{"learning_rate": 0.1, "label_names": ["labels"], **settings}
    )
    return Trainer(
        model,
        args,
        train_dataset=Line() if train is None else train,
        eval_dataset=Line(66) if evaluate is None else evaluate,
        **given,
    )


def close(prediction: Any) -> dict[str, float]:
    right = np.abs(prediction.predictions - prediction.label_ids) <= 0.5
    return {"accuracy": float(right.astype(np.float32).mean())}


def test_lengths_of_loaders(tmp_path: Path) -> None:
    trainer = made(
        tmp_path,
        train=Line(66),
        evaluate=Line(74),
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
    )
    assert trainer.get_train_dataloader().total_batch_size == 16
    assert trainer.get_eval_dataloader().total_batch_size == 32
    assert (len(trainer.get_train_dataloader()), len(trainer.get_eval_dataloader())) == (5, 3)
    assert len(trainer.get_eval_dataloader(Line(128))) == 4
    dropping = made(
        tmp_path,
        train=Line(66),
        evaluate=Line(74),
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        dataloader_drop_last=True,
    )
    # Of an evaluation nothing is left out, which transformers would do here.
    assert (len(dropping.get_train_dataloader()), len(dropping.get_eval_dataloader())) == (4, 3)


def test_persistent_evaluation_loaders_are_kept(tmp_path: Path) -> None:
    rows = {"one": Line(4), "two": Line(6)}
    kept = made(
        tmp_path, evaluate=rows, dataloader_persistent_workers=True, dataloader_num_workers=1
    )
    assert kept.get_eval_dataloader("one") is kept.get_eval_dataloader("one")
    assert kept.get_eval_dataloader("one") is not kept.get_eval_dataloader("two")
    anew = made(tmp_path, evaluate=rows)
    assert anew.get_eval_dataloader("one") is not anew.get_eval_dataloader("one")
    assert anew.get_eval_dataloader("one").dataset.rows is rows["one"]
    assert set(anew.evaluate()) >= {"eval_one_loss", "eval_two_loss"}


def test_loader_of_ones_own_without_a_dataset(tmp_path: Path) -> None:
    class Batches:
        def __init__(self, rows: Dataset[Any]) -> None:
            self.loader = DataLoader(rows, batch_size=8)

        def __iter__(self) -> Any:
            return iter(self.loader)

        def __len__(self) -> int:
            return len(self.loader)

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return Batches(self.train_dataset)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return Batches(self.eval_dataset)

    args = arguments(str(tmp_path), max_steps=4, label_names=["labels"])
    trainer = Own(PretrainedFit(LineConfig()), args, train_dataset=Line(), eval_dataset=Line())
    assert trainer.train().global_step == 4
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("rows", [64, 66])
@pytest.mark.parametrize("batched", [False, True])
def test_evaluation(rows: int, batched: bool, tmp_path: Path) -> None:
    seen: list[Any] = []

    def in_batches(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append((prediction.predictions - prediction.label_ids).abs() <= 0.5)
        return {"accuracy": torch.cat(seen).float().mean().item()} if compute_result else {}

    metrics: Callable[..., Any] = in_batches if batched else close
    trainer = made(
        tmp_path,
        a=1.5,
        b=2.5,
        evaluate=Line(rows),
        compute_metrics=metrics,
        batch_eval_metrics=batched,
    )
    found = trainer.evaluate()
    x, y = Line(rows).x, Line(rows).ys[0]
    assert found["eval_loss"] == pytest.approx(
        float(((1.5 * x + 2.5 - y) ** 2).mean()), abs=1e-6
    )
    assert found["eval_accuracy"] == pytest.approx(
        float((np.abs(1.5 * x + 2.5 - y) <= 0.5).mean())
    )


def test_logits_are_preprocessed(tmp_path: Path) -> None:
    trainer = made(
        tmp_path,
        a=1.5,
        b=2.5,
        compute_metrics=close,
        preprocess_logits_for_metrics=lambda logits, labels: logits + 1,
    )
    x, y = Line(66).x, Line(66).ys[0]
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(
        float((np.abs(1.5 * x + 3.5 - y) <= 0.5).mean())
    )


def test_predictions_with_several_outputs_and_labels(tmp_path: Path) -> None:
    rows = Line(66, labels=("labels", "labels_2"))
    trainer = made(
        tmp_path, a=1.5, b=2.5, outputs=2, evaluate=rows, label_names=["labels", "labels_2"]
    )
    output = trainer.predict(rows)
    assert len(output.predictions) == 2
    for prediction, labels, y in zip(
        output.predictions, output.label_ids, rows.ys, strict=True
    ):
        np.testing.assert_allclose(prediction, 1.5 * rows.x + 2.5, rtol=1e-6)
        np.testing.assert_array_equal(labels, y)


def test_predictions_of_growing_rows(tmp_path: Path) -> None:
    class Growing(Dataset[Any]):
        """Batches of two rows; each longer than the one before."""

        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {
                "x": np.full(1 + index // 2, index, np.float32),
                "labels": np.full(1 + index // 2, index, np.float32),
            }

    trainer = made(tmp_path, a=1.0, evaluate=Growing(), per_device_eval_batch_size=2)
    output = trainer.predict(Growing())
    assert output.predictions.shape == (7, 4)
    for row, prediction in enumerate(output.predictions):
        assert prediction.tolist() == [row] * (1 + row // 2) + [-100] * (3 - row // 2)


def test_streams_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Line()[index] for index in range(20)])

    trainer = made(tmp_path, train=Stream(), evaluate=Stream(), max_steps=4)
    assert trainer.train().global_step == 4
    x, y = Line().x[:20], Line().ys[0][:20]
    a, b = trainer.model.a.item(), trainer.model.b.item()
    # 20 rows in batches of 8: transformers weighs the last four as its padding has it, so only about.
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        float(((a * x + b - y) ** 2).mean()), rel=0.2
    )


def test_data_seed_alone_decides_the_order(tmp_path: Path) -> None:
    def order(**settings: Any) -> list[float]:
        trainer = made(tmp_path, num_train_epochs=1, **settings)
        trainer.train()
        return trainer.model.seen

    assert order(seed=1, data_seed=5) == order(seed=2, data_seed=5)
    assert order(seed=1) != order(seed=2)
    assert order(train_sampling_strategy="sequential") == Line().x.tolist()


def test_loss_of_a_step_is_that_of_a_prediction(tmp_path: Path) -> None:
    def own(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    rows = Sentences(4)
    batch = {name: torch.stack([rows[index][name] for index in range(4)]) for name in rows[0]}
    for loss_function in (None, own):
        model = causal_model()
        trainer = Trainer(model, arguments(str(tmp_path)), compute_loss_func=loss_function)
        targets = int((batch["labels"][:, 1:] != -100).sum())
        trained = trainer.training_step(model, dict(batch), torch.tensor(targets))
        predicted = trainer.prediction_step(model, dict(batch), prediction_loss_only=True)[0]
        torch.testing.assert_close(trained, predicted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("pretrained", "noisy"), [(True, True), (False, False)])
def test_resume_is_exact_from_any_checkpoint(
    pretrained: bool, noisy: bool, tmp_path: Path
) -> None:
    settings = {
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_strategy": "steps",
        "logging_steps": 5,
    }
    settings |= {"train": Line(128), "pretrained": pretrained, "noisy": noisy}
    whole = made(tmp_path, **settings)
    whole.train()
    # Also from behind the first epoch's end, at step 16.
    for step in (5, 15, 20):
        again = made(tmp_path, **settings)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert (again.model.a.item(), again.model.b.item()) == (
            whole.model.a.item(),
            whole.model.b.item(),
        )
        assert again.state.global_step == whole.state.global_step == 48
        logged = [
            [line.get("loss") for line in one.state.log_history] for one in (again, whole)
        ]
        assert logged[0] == logged[1]


def test_resume_refuses_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        made(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7-bogus"))


def test_resume_into_another_folder_ends_the_epoch(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "train": Line(13)}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    made(tmp_path / "first", max_steps=2, **settings).train()
    resumed = made(tmp_path / "second", num_train_epochs=1, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert (tmp_path / "second" / "checkpoint-3" / "model.safetensors").is_file()
    assert len(resumed.model.seen) == 1  # the thirteenth row


def test_resume_with_frozen_parameters(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5, "train": Line(128)}

    def frozen() -> Trainer:
        trainer = made(tmp_path, **settings)
        trainer.model.a.requires_grad_(False)
        return trainer

    whole, again = frozen(), frozen()
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    assert again.model.a.item() == 0
    assert again.model.b.item() == whole.model.b.item()


def test_batch_size_of_now_counts_after_a_resume(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    made(tmp_path, max_steps=2, per_device_train_batch_size=2, **settings).train()
    resumed = made(tmp_path, max_steps=4, per_device_train_batch_size=4, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(resumed.model.seen) == 3 * 4


def test_batch_size_is_found_when_memory_is_short(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Short(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sizes.append(state.train_batch_size)
            if state.train_batch_size >= 16:
                raise RuntimeError("CUDA out of memory.")

    trainer = made(
        tmp_path,
        auto_find_batch_size=True,
        per_device_train_batch_size=16,
        num_train_epochs=1,
        callbacks=[Short()],
    )
    trainer.train()
    assert sizes[0] == 16
    assert trainer.state.global_step == math.ceil(64 / sizes[-1])
    assert sizes[-1] < 16


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = made(
        tmp_path,
        learning_rate=2.0,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        max_steps=10,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-6)


def test_columns_of_a_dataset_that_the_model_does_not_take(tmp_path: Path) -> None:
    from datasets import Dataset as Columns

    line = Line(20)
    rows = Columns.from_dict({"x": line.x, "labels": line.ys[0], "text": ["of no use"] * 20})
    trainer = made(tmp_path, a=1.5, b=2.5, train=rows, evaluate=rows, num_train_epochs=1)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        float(((1.5 * line.x + 2.5 - line.ys[0]) ** 2).mean()), abs=1e-6
    )
    trainer.model.seen.clear()
    trainer.train()
    assert sorted(trainer.model.seen) == sorted(line.x.tolist())
