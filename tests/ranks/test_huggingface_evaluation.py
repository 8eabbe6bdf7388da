"""The Trainer's evaluation on real ranks: sum / count, and predictions in the dataset's order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.huggingface_cases import (
    Reviews,
    Sentences,
    arguments,
    causal_model,
    classifier,
    mean_by_hand,
    on_ranks,
)

pytestmark = pytest.mark.ranks
SIZES = (1, 2, 3, 5, 7, 8, 13, 17)
BATCHES = (1, 2, 4)
# (rows, rows of a batch)
PREDICTED = ((7, 2), (5, 4), (1, 2), (12, 2))


def evaluate_all(folder: str) -> list[float]:
    """Losses of both models for every size of batch and set."""
    from threefold.integrations.huggingface import Trainer

    found = []
    for model, rows_of in ((causal_model(), Sentences), (classifier(), Reviews)):
        for batch_size in BATCHES:
            trainer = Trainer(model, arguments(folder, per_device_eval_batch_size=batch_size))
            found += [trainer.evaluate(rows_of(size))["eval_loss"] for size in SIZES]
    return found


def predict_all(folder: str) -> list[tuple[Any, Any, dict[str, float]]]:
    from threefold.integrations.huggingface import Trainer

    def accuracy(prediction: Any) -> dict[str, float]:
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"accuracy": float(right.mean()), "rows": len(right)}

    found = []
    for size, batch_size in PREDICTED:
        args = arguments(folder, per_device_eval_batch_size=batch_size)
        output = Trainer(classifier(), args, compute_metrics=accuracy).predict(Reviews(size))
        found.append((output.predictions, output.label_ids, output.metrics))
    return found


def both(folder: str) -> tuple[Any, Any]:
    return evaluate_all(folder), predict_all(folder)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_evaluation_is_sum_over_count_and_in_order(num_ranks: int, tmp_path: Path) -> None:
    causal, classes = causal_model(), classifier()
    by_hand = [mean_by_hand(causal, Sentences(size)) for size in SIZES] * len(BATCHES)
    by_hand += [mean_by_hand(classes, Reviews(size)) for size in SIZES] * len(BATCHES)
    alone = predict_all(str(tmp_path))
    for losses, predicted in on_ranks(both, num_ranks, str(tmp_path)):
        for value, wanted in zip(losses, by_hand, strict=True):
            assert value == pytest.approx(wanted, abs=1e-6) or (
                math.isnan(wanted) and math.isnan(value)
            )
        for case, one, wanted_one in zip(PREDICTED, predicted, alone, strict=True):
            predictions, labels, metrics = one
            np.testing.assert_allclose(predictions, wanted_one[0], atol=1e-6)
            np.testing.assert_array_equal(
                labels, [int(Reviews(case[0])[row]["labels"]) for row in range(case[0])]
            )
            assert metrics["test_rows"] == case[0]
            assert metrics["test_accuracy"] == wanted_one[2]["test_accuracy"]
            assert metrics["test_loss"] == pytest.approx(wanted_one[2]["test_loss"], abs=1e-6)


def evaluate_stream(folder: str) -> float:
    from torch.utils.data import IterableDataset

    from threefold.integrations.huggingface import Trainer

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (Sentences(8)[row] for row in range(8))

    args = arguments(folder, per_device_eval_batch_size=2)
    return float(Trainer(causal_model(), args).evaluate(Stream())["eval_loss"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_loss_of_a_stream_is_not_multiplied_by_the_ranks(
    num_ranks: int, tmp_path: Path
) -> None:
    wanted = mean_by_hand(causal_model(), Sentences(8))
    assert on_ranks(evaluate_stream, num_ranks, str(tmp_path)) == pytest.approx(
        [wanted] * num_ranks, abs=1e-6
    )


def train_after(folder: str, first: str) -> dict[str, Any]:
    """The weights of two epochs after an evaluation, predictions, or neither."""
    from threefold.integrations.huggingface import Trainer

    args = arguments(
        f"{folder}/{first}", num_train_epochs=2, per_device_train_batch_size=2, optim="sgd"
    )
    trainer = Trainer(classifier(), args, train_dataset=Reviews(12), eval_dataset=Reviews(5))
    if first != "train":
        getattr(trainer, first)(Reviews(5))
    trainer.train()
    assert trainer.model_wrapped is not trainer.model
    return {
        name: values.detach().numpy().copy()
        for name, values in trainer.model.state_dict().items()
    }


@pytest.mark.parametrize("first", ["evaluate", "predict"])
def test_what_comes_before_the_training_leaves_it_one_training(
    first: str, tmp_path: Path
) -> None:
    (wanted, _) = on_ranks(train_after, 2, str(tmp_path), "train")
    for weights in on_ranks(train_after, 2, str(tmp_path), first):
        assert all(np.array_equal(weights[name], values) for name, values in wanted.items())
