"""The Trainer composed with other Trainers and collators, and orders by length, on one and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from ranks.huggingface_cases import Sentences, arguments, causal_model, mean_by_hand, on_ranks
from ranks.test_huggingface_training import assert_same_curve, curve_of, settings, stopper
from threefold.data.sampling.sampler import DistributedSampler
from threefold.errors import ConfigError, DataError
from threefold.integrations.huggingface import Trainer
from threefold.integrations.huggingface.loaders import GroupedSampler

pytestmark = pytest.mark.ranks


def test_methods_that_are_set_on_a_trainer_stay(tmp_path: Path) -> None:
    args = arguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4
    )
    trainer = Trainer(
        causal_model(), args, train_dataset=Sentences(24), eval_dataset=Sentences(7)
    )
    heard = []
    own = {name: getattr(trainer, name) for name in ("compute_loss", "prediction_step")}
    for name, method in own.items():
        setattr(
            trainer,
            name,
            lambda *given, name=name, method=method, **more: (
                heard.append(name),
                method(*given, **more),
            )[1],
        )
    trainer.train()
    trainer.evaluate()
    trainer.evaluate()
    # Two batches of an evaluation: each computes a loss in a prediction step.
    assert heard == ["compute_loss"] * 3 + ["prediction_step", "compute_loss"] * 4


class Lines(torch.utils.data.Dataset[dict[str, Any]]):
    """Row i has 2 to 12 tokens, all of which are targets."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.lengths = [
            2 + int(torch.randint(11, (), generator=generator)) for _ in range(size)
        ]
        self.tokens = [
            torch.randint(3, 64, (length,), generator=generator).tolist()
            for length in self.lengths
        ]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class NoSuper(transformers.Trainer):
    """Predicts by itself and takes an argument of its own, as TRL's Trainers do."""

    def __init__(self, model: Any = None, args: Any = None, *, own: int, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)
        self.own = own

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        with torch.no_grad():
            loss, outputs = self.compute_loss(
                model, self._prepare_inputs(inputs), return_outputs=True
            )
        return loss, outputs["logits"], inputs["labels"]


class Before(NoSuper, Trainer):
    """Ours after the other."""


class After(Trainer, NoSuper):
    """Ours before the other."""


def composed(folder: str) -> dict[str, float]:
    found = {}
    for kind in (Before, After):
        args = arguments(folder, per_device_eval_batch_size=2)
        trainer = kind(causal_model(), args, own=3, eval_dataset=Sentences(7))
        assert trainer.own == 3
        found[kind.__name__] = trainer.evaluate()["eval_loss"]
    return found


def flattened(folder: str, base: Any = Trainer) -> tuple[Any, Any, float]:
    args = arguments(folder, per_device_eval_batch_size=2, eval_do_concat_batches=False)
    collate = transformers.DataCollatorWithFlattening()
    trainer = base(causal_model(), args, data_collator=collate, eval_dataset=Lines(7))
    output = trainer.predict(Lines(7))
    return output.predictions, output.label_ids, output.metrics["test_loss"]


class Pairs(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Row i is to be answered with 1 + i % 4 tokens."""

    def __init__(self, size: int) -> None:
        self.tokens = Sentences(size).tokens.clamp(min=3)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[1 + index % 4 :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def translator() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    sizes = {
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes, **ends))


def translated(folder: str) -> list[tuple[list[Any], float]]:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    settings = vars(arguments(folder, per_device_eval_batch_size=2))
    names = (
        "output_dir",
        "use_cpu",
        "report_to",
        "disable_tqdm",
        "dataloader_pin_memory",
        "per_device_eval_batch_size",
    )
    args = Seq2SeqTrainingArguments(
        predict_with_generate=True,
        generation_max_length=6,
        **{name: settings[name] for name in names},
    )
    found = []
    for bases in ((Seq2SeqTrainer, Trainer), (Trainer, Seq2SeqTrainer)):
        trainer = type("Translator", bases, {})(translator(), args)
        output = trainer.predict(Pairs(7))
        found.append((output.predictions.tolist(), output.metrics["test_loss"]))
    return found


def both(
    folder: str,
) -> tuple[dict[str, float], tuple[Any, Any, float], list[tuple[list[Any], float]]]:
    return composed(folder), flattened(folder), translated(folder)


def line_mean(rows: Lines) -> float:
    model, total, count = causal_model(), 0.0, 0
    model.eval()
    with torch.no_grad():
        for tokens in rows.tokens:
            row = torch.tensor(tokens)[None]
            logits = model(input_ids=row).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(
                logits, row[0, 1:], reduction="sum"
            ).item()
            count += row.shape[1] - 1
    return total / count


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluation_is_exact_in_any_order_of_classes_and_of_flattened_rows(
    num_ranks: int, tmp_path: Path
) -> None:
    wanted, rows, pairs = mean_by_hand(causal_model(), Sentences(7)), Lines(7), Pairs(7)
    inputs, labels = (
        torch.stack([pairs[row][name] for row in range(7)]) for name in ("input_ids", "labels")
    )
    with torch.no_grad():
        answer = translator().eval()(input_ids=inputs, labels=labels).loss.item()
    said = translator().generate(inputs, max_length=6)
    for losses, (predictions, labels, loss), translations in on_ranks(
        both, num_ranks, str(tmp_path)
    ):
        for texts, answer_loss in translations:
            assert answer_loss == pytest.approx(answer, abs=1e-5)
            assert [row[: said.shape[1]] for row in texts] == said.tolist()
        assert losses == pytest.approx({"Before": wanted, "After": wanted}, abs=1e-6)
        assert loss == pytest.approx(line_mean(rows), abs=1e-6)
        # A flattened row for each batch of each rank, none twice: together the tokens of the set, each once.
        assert sum(len(batch) for batch in labels) == (4 if num_ranks == 1 else 5)
        places = [row[row != -100] for batch in labels for row in np.asarray(batch)]
        tokens = [each for line in rows.tokens for each in line[1:]]
        assert np.concatenate(places).tolist() == tokens
        assert [len(batch) for batch in predictions] == [len(batch) for batch in labels]


class Read(Trainer):
    """Notes the rows of each step."""

    def _part_step(self, part: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        if part.rows:
            rows = inputs["input_ids"]
            self.seen.append([row[row != 0].tolist() for row in rows])
        return super()._part_step(part, model, inputs, num_items_in_batch)


def pad(rows: list[Any]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def grouped(folder: str, batch_size: int, more: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    more = dict(more)
    resume, stop, size = (
        more.pop("resume", None),
        more.pop("stop_after", None),
        more.pop("size", 61),
    )
    asked = {
        "train_sampling_strategy": "group_by_length",
        "num_train_epochs": 2,
        "save_steps": 100,
        **more,
    }
    trainer = Read(
        causal_model(),
        arguments(folder, **settings(batch_size, **asked)),
        train_dataset=Lines(size),
    )
    trainer.data_collator, trainer.seen = pad, []
    if stop is not None:
        trainer.add_callback(stopper(stop))
    trainer.train(resume_from_checkpoint=resume)
    return curve_of(trainer.state.log_history), [row for batch in trainer.seen for row in batch]


def test_rows_of_similar_lengths_on_any_ranks_and_after_a_stop(tmp_path: Path) -> None:
    curve, rows = grouped(str(tmp_path / "whole"), 8, {})
    assert sorted(rows[:61]) == sorted(Lines(61).tokens) == sorted(rows[61:])
    assert rows[:61] != rows[61:]
    lengths = [len(row) for row in rows[:61]]
    assert lengths[0] == max(Lines(61).lengths)
    spread = [
        np.ptp([lengths[place] for place in range(first, min(first + 8, 61))])
        for first in range(8, 61, 8)
    ]
    assert np.mean(spread) < 0.6 * np.ptp(lengths)
    folder = str(tmp_path / "stopped")
    on_ranks(grouped, 1, folder, 8, {"save_strategy": "steps", "stop_after": 11})
    resumed = on_ranks(grouped, 2, folder, 4, {"save_strategy": "steps", "resume": True})
    assert_same_curve(resumed[0][0], curve)
    # Step 12 is the fourth of the second epoch, whose first three had 24 rows.
    assert sorted(row for rank in resumed for row in rank[1]) == sorted(rows[61 + 24 :])


def test_an_epoch_that_left_rows_out_is_over_when_its_last_step_is_resumed(
    tmp_path: Path,
) -> None:
    """What it has read does not count in the next one, nor in one that begins again."""
    more = {"dataloader_drop_last": True, "save_strategy": "steps"}
    curve, rows = grouped(str(tmp_path / "whole"), 8, more)
    grouped(str(tmp_path), 8, {**more, "stop_after": 7})
    # Of 61 rows 56 are in the 7 steps of an epoch.
    resumed = on_ranks(grouped, 2, str(tmp_path), 4, {**more, "resume": True})
    assert_same_curve(resumed[0][0], curve)
    assert sorted(row for rank in resumed for row in rank[1]) == sorted(rows[56:])
    grouped(str(tmp_path / "inside"), 8, {**more, "stop_after": 3})
    anew = {**more, "resume": True, "ignore_data_skip": True}
    assert grouped(str(tmp_path / "inside"), 8, anew)[1][:56] == rows[:56]


def test_grouped_order_is_every_row_once_and_known_by_the_lengths() -> None:
    for size in (1, 2, 3, 7, 64, 9000):
        lengths = [1 + row * 7919 % 100 for row in range(size)]
        sampler = GroupedSampler.for_loop(
            range(size),
            lengths=lengths,
            num_replicas=1,
            rank=0,
            seed=1,
            tail="exact",
            global_batch=4,
        )
        sampler.open_pass()
        order = list(sampler)
        assert sorted(order) == list(range(size))
        assert lengths[order[0]] == max(lengths)
    other = GroupedSampler(range(size), lengths=[*lengths[:-1], 1], num_replicas=1, rank=0)
    with pytest.raises(DataError, match="the saved state has lengths = "):
        other.load_state_dict(
            GroupedSampler(range(size), lengths=lengths, num_replicas=1, rank=0).state_dict()
        )
    with pytest.raises(DataError, match="lengths"):
        DistributedSampler(range(size), num_replicas=1, rank=0).load_state_dict(
            other.state_dict()
        )


def grown(folder: str, size: int, more: dict[str, Any]) -> tuple[int, float]:
    more = dict(more)
    resume, stop = more.pop("resume", None), more.pop("stop_after", None)
    args = arguments(
        folder, **settings(8, save_strategy="steps", save_steps=100, num_train_epochs=2, **more)
    )
    trainer = Trainer(causal_model(), args, train_dataset=Sentences(size))
    if stop is not None:
        trainer.add_callback(stopper(stop))
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step, trainer.state.epoch


@pytest.mark.parametrize("drop", [False, True])
def test_a_dataset_may_grow_at_an_epochs_end(drop: bool, tmp_path: Path) -> None:
    more = {"dataloader_drop_last": drop}
    steps = 2 if drop else 3
    grown(str(tmp_path), 21, {**more, "stop_after": steps})
    # The second epoch reads 40 rows in 5 steps.
    assert grown(str(tmp_path), 40, {**more, "resume": True}) == (steps + 5, 2)
    from threefold.commands.data import audit_lines

    assert "epoch 1: 40 of 40 rows, each exactly once" in "\n".join(audit_lines(tmp_path))
    assert (tmp_path / f"audit-before-step-{steps + 1}.jsonl").is_file()


def test_a_dataset_that_grows_inside_an_epoch_is_refused_with_what_works(
    tmp_path: Path,
) -> None:
    grown(str(tmp_path), 21, {"stop_after": 1})
    with pytest.raises(DataError) as refused:
        grown(str(tmp_path), 40, {"resume": True})
    (problem,) = refused.value.problems
    assert problem.what == "the saved state has num_rows = 21, but here num_rows = 40"
    assert problem.fix.endswith(
        "; with other data, resume from a checkpoint at an epoch's end, or "
        "TrainingArguments(ignore_data_skip=True), which keeps the weights and begins an epoch"
    )
    assert grown(str(tmp_path), 40, {"resume": True, "ignore_data_skip": True})[0] == 10
    with pytest.raises(DataError, match="the saved state has seed = 3, but here seed = 4"):
        grown(str(tmp_path), 40, {"resume": True, "data_seed": 4})


def test_other_trainers_of_trl_are_refused_by_name() -> None:
    other = type(
        "GRPOTrainer", (transformers.Trainer,), {"__module__": "trl.trainer.grpo_trainer"}
    )
    for bases in ((other, Trainer), (Trainer, other)):
        with pytest.raises(ConfigError) as refused:
            type("Mine", bases, {})(causal_model())
        (problem,) = refused.value.problems
        assert problem.what == "the Trainer is composed with TRL's GRPOTrainer"
        assert problem.fix == "use trl.GRPOTrainer alone, with callbacks=[AuditCallback()]"
