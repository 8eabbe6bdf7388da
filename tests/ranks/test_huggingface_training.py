"""The Trainer's steps on real ranks: they follow a loop by hand, on any ranks and micro-batches, after any stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ranks.huggingface_cases import (
    Reviews,
    Sentences,
    arguments,
    causal_model,
    classifier,
    on_ranks,
)
from threefold.commands.data import audit_lines
from threefold.data.order.permutation import Permutation

pytestmark = pytest.mark.ranks

GLOBAL_BATCH, RATE, SEED = 8, 1e-2, 3


def curve_of(log: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in log if "grad_norm" in line]


def settings(batch_size: int, **more: Any) -> dict[str, Any]:
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": GLOBAL_BATCH // (batch_size * world),
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "logging_steps": 1,
        "logging_strategy": "steps",
        "data_seed": SEED,
        **more,
    }


def train(
    folder: str, kind: str, size: int, batch_size: int, more: dict[str, Any]
) -> dict[str, Any]:
    from threefold.integrations.huggingface import Trainer

    model, rows = (
        (causal_model(), Sentences(size))
        if kind == "causal"
        else (classifier(**DROPOUT_OFF), Reviews(size))
    )
    resume = more.pop("resume", None)
    stop = more.pop("stop_after", None)
    trainer = Trainer(
        model, arguments(folder, **settings(batch_size, **more)), train_dataset=rows
    )
    if stop is not None:
        trainer.add_callback(stopper(stop))
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    return {
        "curve": curve_of(trainer.state.log_history),
        "weights": weights,
        "epoch": trainer.state.epoch,
    }


DROPOUT_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def stopper(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        """Saves and stops after a step, as a user who is told to leave the machine."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                control.should_save = control.should_training_stop = True

    return Stop()


def by_hand(
    kind: str, size: int, epochs: int
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The same training in a loop of its own: one process, whole global batches, loss sum / number of targets."""
    model, rows = (
        (causal_model(), Sentences(size))
        if kind == "causal"
        else (classifier(**DROPOUT_OFF), Reviews(size))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    curve = []
    for epoch in range(epochs):
        order = Permutation(size, seed=SEED, epoch=epoch).at(np.arange(size))
        for first in range(0, size, GLOBAL_BATCH):
            batch = [
                rows[int(order[place])]
                for place in range(first, min(first + GLOBAL_BATCH, size))
            ]
            ids = torch.stack([row["input_ids"] for row in batch])
            labels = torch.stack([row["labels"] for row in batch])
            logits = model(input_ids=ids).logits
            if logits.ndim == 3:
                logits, labels = logits[:, :-1], labels[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            curve.append((loss.item(), norm.item()))
    return curve, model.state_dict()


def assert_same_curve(
    found: list[tuple[float, float]], wanted: list[tuple[float, float]]
) -> None:
    assert len(found) == len(wanted)
    for step, ((loss, norm), (wanted_loss, wanted_norm)) in enumerate(
        zip(found, wanted, strict=True), start=1
    ):
        assert loss == pytest.approx(wanted_loss, abs=1e-4), f"loss of step {step}"
        assert norm == pytest.approx(wanted_norm, rel=1e-3), f"norm of step {step}"


def assert_same_weights(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in found.items():
        # A key's bias moves all scores of a query alike: its gradient is rounding, which AdamW makes as large as any.
        if not name.endswith("key.bias"):
            np.testing.assert_allclose(value, wanted[name], atol=1e-4, rtol=1e-3, err_msg=name)


def train_all(folder: str, batch_sizes: list[int]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            kind,
            train(
                f"{folder}/{kind}-{batch_size}", kind, 21, batch_size, {"num_train_epochs": 2}
            ),
        )
        for kind in ("causal", "classes")
        for batch_size in batch_sizes
    ]


@pytest.mark.parametrize(("num_ranks", "batch_sizes"), [(1, [8, 2]), (2, [4, 1]), (4, [2])])
def test_training_follows_a_loop_by_hand(
    num_ranks: int, batch_sizes: list[int], tmp_path: Path
) -> None:
    # 21 rows leave 5 for the third step of each epoch: on 4 ranks some have a row less, on micro-batches of 1 none.
    wanted = {kind: by_hand(kind, 21, 2) for kind in ("causal", "classes")}
    for of_rank in on_ranks(train_all, num_ranks, str(tmp_path), batch_sizes):
        for kind, found in of_rank:
            curve, weights = wanted[kind]
            assert_same_curve(found["curve"], curve)
            assert_same_weights(found["weights"], weights)


def proved(folder: Path) -> str:
    """What `threefold data audit` proves of an output folder."""
    return "\n".join(audit_lines(folder))


# (ranks, rows of a micro-batch) before and after the stop; the global batch stays 8.
RESUMES = [((1, 8), (2, 2)), ((2, 4), (4, 1)), ((4, 2), (1, 4))]


@pytest.mark.parametrize(("before", "after"), RESUMES)
def test_resume_on_other_ranks_follows_the_uninterrupted_run(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    wanted, weights = by_hand("causal", 29, 2)
    folder, more = (
        str(tmp_path),
        {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 100},
    )
    first = on_ranks(
        train, before[0], folder, "causal", 29, before[1], {**more, "stop_after": 2}
    )[0]
    for found in on_ranks(
        train, after[0], folder, "causal", 29, after[1], {**more, "resume": True}
    ):
        # The log of a resumed run begins with that of the run before.
        assert_same_curve(found["curve"], wanted)
        assert found["curve"][:2] == first["curve"]
        assert found["epoch"] == 2
        assert_same_weights(found["weights"], weights)
    text = proved(tmp_path)
    assert "epoch 0: 29 of 29 rows, each exactly once" in text
    assert "epoch 1: 29 of 29 rows, each exactly once" in text
    assert "2 starts" in text


def train_with_global_batch(
    folder: str, batch_size: int, more: dict[str, Any]
) -> tuple[int, float, list[float]]:
    from threefold.integrations.huggingface import Trainer

    more = dict(more)
    resume, stop = more.pop("resume", None), more.pop("stop_after", None)
    own = {
        **settings(8),
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": batch_size,
    }
    trainer = Trainer(
        causal_model(), arguments(folder, **{**own, **more}), train_dataset=Sentences(48)
    )
    if stop is not None:
        trainer.add_callback(stopper(stop))
    trainer.train(resume_from_checkpoint=resume)
    epochs = [line["epoch"] for line in trainer.state.log_history if "grad_norm" in line]
    return trainer.state.global_step, trainer.state.epoch, epochs


@pytest.mark.parametrize(
    ("num_ranks", "batch_size", "steps"),
    [(2, 2, 3 + 6 + 12), (2, 8, 3 + 2 + 3), (1, 5, 3 + 5 + 10)],
)
def test_resume_with_another_batch_size_repeats_and_loses_no_sample(
    num_ranks: int, batch_size: int, steps: int, tmp_path: Path
) -> None:
    """transformers' own Trainer, after half the global batch, repeats 24 of these 48 samples."""
    more = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 100}
    on_ranks(train_with_global_batch, 1, str(tmp_path), 8, {**more, "stop_after": 3})
    for found_steps, epoch, epochs in on_ranks(
        train_with_global_batch, num_ranks, str(tmp_path), batch_size, {**more, "resume": True}
    ):
        assert found_steps == steps
        assert epoch == 2
        assert epochs == sorted(set(epochs))
    text = proved(tmp_path)
    assert "epoch 0: 48 of 48 rows, each exactly once" in text
    assert "epoch 1: 48 of 48 rows, each exactly once" in text


def test_resume_at_an_epochs_end_and_with_max_steps(tmp_path: Path) -> None:
    more = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6}
    on_ranks(train_with_global_batch, 1, str(tmp_path), 8, {**more, "stop_after": 6})
    assert (
        json.loads((tmp_path / "checkpoint-6" / "threefold.json").read_text())["loader"][
            "position"
        ]
        == 48
    )
    steps, epoch, _ = on_ranks(
        train_with_global_batch, 2, str(tmp_path), 4, {**more, "resume": True}
    )[0]
    assert (steps, epoch) == (12, 2)
    assert "epoch 1: 48 of 48 rows, each exactly once" in proved(tmp_path)


def test_drop_last_leaves_out_whole_steps_on_any_mesh(tmp_path: Path) -> None:
    more = {"num_train_epochs": 2, "dataloader_drop_last": True}
    curves = []
    for num_ranks, batch_size in ((1, 8), (2, 2)):
        folder = tmp_path / str(num_ranks)
        curves.append(
            on_ranks(train, num_ranks, str(folder), "causal", 23, batch_size, dict(more))[0][
                "curve"
            ]
        )
        assert (
            "epoch 0: 16 of 23 rows, each exactly once; 7 not: they do not fill a batch at the end"
            in proved(folder)
        )
    for curve in curves[1:]:
        assert_same_curve(curve, curves[0])


@pytest.mark.examples
def test_workers_read_the_same(tmp_path: Path) -> None:
    wanted, _ = by_hand("causal", 29, 2)
    more = {
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 100,
        "dataloader_num_workers": 2,
    }
    on_ranks(train, 2, str(tmp_path), "causal", 29, 2, {**more, "stop_after": 3})
    for found in on_ranks(train, 2, str(tmp_path), "causal", 29, 4, {**more, "resume": True}):
        assert_same_curve(found["curve"], wanted)
    assert "epoch 1: 29 of 29 rows, each exactly once" in proved(tmp_path)


def _own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Has no use for labels."""
    return outputs.logits.float().square().mean((1, 2)).sum() / num_items_in_batch


def _without_labels(folder: str, labels: bool, micro_batch: int) -> Any:
    from threefold.integrations.huggingface import Trainer

    rows = [{"input_ids": row["input_ids"]} for row in Sentences(11)]  # type: ignore[attr-defined]
    if labels:
        rows = [{**row, "labels": torch.full_like(row["input_ids"], -100)} for row in rows]
    trainer = Trainer(
        causal_model(),
        arguments(folder, **settings(micro_batch)),
        train_dataset=rows,
        eval_dataset=rows,
        compute_loss_func=_own_loss,
    )
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"] if labels else 0.0
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        by_hand = float(_own_loss(trainer.model(input_ids=ids), None, len(rows)))
    return curve_of(trainer.state.log_history), evaluated, by_hand


def test_a_loss_that_has_no_use_for_labels_is_the_mean_over_rows(tmp_path: Path) -> None:
    wanted, *_ = _without_labels(str(tmp_path / "alone"), False, 8)
    for ranks in (1, 2):
        folder = str(tmp_path / str(ranks))
        for found in on_ranks(_without_labels, ranks, folder, True, 4 // ranks):
            curve, evaluated, by_hand = found
            assert_same_curve(curve, wanted)
            assert evaluated == pytest.approx(by_hand, rel=1e-5)


class Growing(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """A stream whose batches are longer and longer."""

    def __iter__(self) -> Any:
        for length in range(4, 20):
            yield {"input_ids": torch.arange(length), "labels": torch.arange(length)}


def _train_on_a_stream(folder: str) -> None:
    from threefold.integrations.huggingface import Trainer

    more = settings(1, max_steps=2, gradient_accumulation_steps=1)
    Trainer(causal_model(), arguments(folder, **more), train_dataset=Growing()).train()


def test_a_stream_that_rank_0_cannot_deal_out_ends_all_ranks(tmp_path: Path) -> None:
    """accelerate joins the batches of all ranks on rank 0, while the others wait for it."""
    with pytest.raises(AssertionError, match="You can't use batches of different size"):
        on_ranks(_train_on_a_stream, 2, str(tmp_path))


class Plain(torch.nn.Module):
    """Takes no number of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = causal_model()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def _without_targets(folder: str, is_plain: bool) -> str:
    from threefold.errors import DataError
    from threefold.integrations.huggingface import Trainer

    rows = [dict(row) for row in Sentences(8)]  # type: ignore[attr-defined]
    for row in rows:
        row["labels"] = torch.full_like(row["labels"], -100)
    model = Plain() if is_plain else causal_model()
    trainer = Trainer(model, arguments(folder, **settings(2)), train_dataset=rows)
    weights = [each.clone() for each in trainer.model.parameters()]
    with pytest.raises(DataError) as refused:
        trainer.train()
    assert all(map(torch.equal, weights, trainer.model.parameters()))
    return refused.value.problems[0].what


def test_a_step_without_a_target_is_refused_before_it_moves_a_weight(tmp_path: Path) -> None:
    """transformers divides by the number of targets; by none of them, weights would follow the optimizer's moments."""
    for ranks, is_plain in ((1, False), (2, False), (2, True)):
        folder = str(tmp_path / f"{ranks} {is_plain}")
        for what in on_ranks(_without_targets, ranks, folder, is_plain):
            assert what.startswith("the global batch has no token that is trained on")
