"""The Trainer where a user's override meets it: losses, loaders and constructors of one's own, on one and two ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, WeightedRandomSampler

from ranks.huggingface_cases import Sentences, arguments, causal_model, on_ranks
from ranks.test_huggingface_training import assert_same_curve, curve_of, settings, stopper
from threefold.commands.data import audit_lines
from threefold.data.order.permutation import Permutation
from threefold.integrations.huggingface import Trainer

pytestmark = pytest.mark.ranks

# 21 rows leave 5 for the third step of an epoch: on 2 ranks one has a row less.
ROWS, SEED = (21, 3)


class Questions(Dataset[dict[str, Tensor]]):
    """Token rows, whose wanted tokens have a name that transformers does not know."""

    def __init__(self, size: int, name: str) -> None:
        self._tokens, self._name = Sentences(size).tokens, name

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], self._name: self._tokens[index]}


def loss_of_rows(model: Any, tokens: Tensor) -> Tensor:
    """The loss of each row, [rows]."""
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    return (
        F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
        .view(len(tokens), -1)
        .mean(1)
    )


def with_loss(base: Any, kind: str) -> Any:
    class Own(base):  # type: ignore[misc]
        gathered: list[int]

        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            if kind == "added":
                loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                loss = loss + 0.5 * loss_of_rows(model, inputs["input_ids"]).mean()
                return (loss, outputs) if return_outputs else loss
            rows = loss_of_rows(model, inputs["input_ids"])
            if kind == "gathers":
                self.gathered.append(len(self.accelerator.gather(rows.detach())))
            loss = rows.mean()
            return (loss, {"logits": rows.unsqueeze(1)}) if return_outputs else loss

    return Own


def own_loss(
    folder: str, base: Any, kind: str, more: dict[str, Any]
) -> tuple[list[tuple[float, float]], float]:
    rows = Questions(
        more.pop("size", ROWS), "labels" if kind in ("ignores", "added") else "targets"
    )
    held_out = Questions(7, rows._name)
    names = [] if rows._name == "targets" else ["labels"]
    asked = {
        "optim": "sgd",
        "label_names": names,
        "remove_unused_columns": False,
        "num_train_epochs": 2,
        **more,
    }
    args = arguments(
        folder, **settings(asked.pop("batch_size"), per_device_eval_batch_size=2, **asked)
    )
    trainer = with_loss(base, kind)(
        causal_model(), args, train_dataset=rows, eval_dataset=held_out
    )
    trainer.gathered = []
    trainer.can_return_loss = True
    trainer.train()
    measured = trainer.evaluate()["eval_loss"] if kind == "gathers" else float("nan")
    return curve_of(trainer.state.log_history), measured


ACCUMULATED = {"batch_size": 2, "size": 24, "train_sampling_strategy": "sequential"}
KINDS = ("no labels", "gathers", "ignores", "added")


def own_losses(folder: str, world: int) -> dict[str, Any]:
    # Micro-batches of 4 rows on every number of ranks; those that transformers takes for normalised make one a step.
    whole = {"batch_size": 8 // world}
    found = {kind: own_loss(f"{folder}/{kind}", Trainer, kind, dict(whole)) for kind in KINDS}
    found["accumulated"] = own_loss(f"{folder}/a", Trainer, "no labels", dict(ACCUMULATED))
    found["accumulated rest"] = own_loss(f"{folder}/ar", Trainer, "gathers", {"batch_size": 2})
    return found


def rows_by_hand(
    exact: float, of_means: float = 0.0, ranks: int = 1
) -> tuple[list[tuple[float, float]], Any]:
    """A loop of its own, whole global batches: weights of the mean over rows, and of the mean over the ranks' means."""
    model, rows = causal_model(), Sentences(ROWS).tokens
    optimizer, curve = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for epoch in range(2):
        order = Permutation(ROWS, seed=SEED, epoch=epoch).at(np.arange(ROWS))
        for first in range(0, ROWS, 8):
            by_row = loss_of_rows(model, rows[order[first : first + 8]])
            means = torch.stack([by_row[rank::ranks].mean() for rank in range(ranks)])
            loss = exact * by_row.mean() + of_means * means.mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            curve.append((loss.item(), norm.item()))
    return curve, model


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_of_ones_own_is_the_mean_over_rows(num_ranks: int, tmp_path: Path) -> None:
    """Without labels it was too large, once per micro-batch; where it gathered rows, ranks aborted."""
    exact, model = rows_by_hand(1.0)
    model.eval()
    held_out = loss_of_rows(model, Sentences(7).tokens).mean().item()
    accumulated, _ = own_loss(
        str(tmp_path), transformers.Trainer, "no labels", dict(ACCUMULATED)
    )
    for found in on_ranks(own_losses, num_ranks, str(tmp_path), num_ranks):
        for kind in ("no labels", "gathers", "accumulated rest"):
            assert_same_curve(found[kind][0], exact)
        assert found["gathers"][1] == pytest.approx(held_out, abs=1e-6)
        assert_same_curve(found["accumulated"][0], accumulated)
        # One that is told the number of targets and ignores it stays the mean of the ranks' means, as in transformers.
        assert_same_curve(found["ignores"][0], rows_by_hand(0.0, 1.0, num_ranks)[0])
        assert_same_curve(found["added"][0], rows_by_hand(1.0, 0.5, num_ranks)[0])


class Recorded(Trainer):
    """Notes the first tokens of the rows of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: list[list[int]] = []

    def _part_step(self, part: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        if part.rows:
            self.read.append(inputs["input_ids"].tolist())
        return super()._part_step(part, model, inputs, num_items_in_batch)


def own_loader(kind: str) -> Any:
    import threefold

    class Own(Recorded):
        def get_train_dataloader(self) -> Any:
            size = len(self.train_dataset)
            made = {"batch_size": 8 // self.args.world_size, "collate_fn": self.data_collator}
            if kind == "distributed":
                plain = DataLoader(self.train_dataset, shuffle=True, **made)
                return threefold.distribute(plain, self.mesh, seed=SEED)
            samplers = {
                "weighted": lambda: WeightedRandomSampler(
                    [1.0] * 12 + [3.0] * (size - 12), size
                ),
                "subset": lambda: SubsetRandomSampler(range(12)),
            }
            if kind in samplers:
                return self.accelerator.prepare(
                    DataLoader(self.train_dataset, sampler=samplers[kind](), **made)
                )
            return self.accelerator.prepare(
                DataLoader(self.train_dataset, shuffle=True, **made)
            )

    return Own


class OneRank:
    dp_size, dp_rank = 1, 0


def with_own_loader(
    folder: str, kind: str, more: dict[str, Any]
) -> tuple[int, list[Any], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("threefold").addHandler(handler)
    resume, stop = more.pop("resume", None), more.pop("stop_after", None)
    args = arguments(folder, data_seed=SEED, num_train_epochs=2, save_steps=100, **more)
    trainer = own_loader(kind)(causal_model(), args, train_dataset=Sentences(ROWS))
    trainer.mesh = OneRank() if args.world_size == 1 else None
    if stop is not None:
        trainer.add_callback(stopper(stop))
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step, trainer.read, said


LOADERS = ("distributed", "prepared")


def own_loaders(folder: str, more: dict[str, Any]) -> dict[str, Any]:
    found = {kind: with_own_loader(f"{folder}/{kind}", kind, dict(more)) for kind in LOADERS}
    if "resume" not in more:
        found |= {
            kind: with_own_loader(f"{folder}/{kind}", kind, {})
            for kind in ("weighted", "subset")
        }
    return found


def rows_in(read: list[Any]) -> list[Any]:
    return sorted(row for batch in read for row in batch)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1)])
def test_a_loader_of_ones_own_resumes_at_the_next_row(
    before: int, after: int, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "stop_after": 4}
    first = on_ranks(own_loaders, before, str(tmp_path), saving)
    second = on_ranks(
        own_loaders, after, str(tmp_path), {"save_strategy": "steps", "resume": True}
    )
    every = sorted(Sentences(ROWS).tokens.tolist())
    for kind in LOADERS:
        # 3 steps are an epoch.
        epochs = (
            [rank[kind][1][: len(rank[kind][1]) * 3 // 4] for rank in first]
            if before == 1
            else None
        )
        assert epochs is None or rows_in(epochs[0]) == every
        rest = [row for rank in first for row in rank[kind][1][3 if before == 1 else -1 :]]
        rest += [row for rank in second for row in rank[kind][1]]
        assert rows_in(rest) == every, kind
        text = "\n".join(audit_lines(tmp_path / kind))
        assert f"epoch 1: {ROWS} of {ROWS} rows, each exactly once" in text
    for rank in first:
        assert rank["weighted"][0] == 6
        assert any(
            "The audit is off: samples drawn with weights" in line
            for line in rank["weighted"][2]
        )
        assert rank["subset"][0] == 4
        assert any(
            "The audit is off: a SubsetRandomSampler does not draw" in line
            for line in rank["subset"][2]
        )
