"""Ranks that do not train together in transformers' loop are named on all of them, in that step; nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.huggingface_cases import Sentences, arguments, causal_model
from ranks.spawn import run_ranks
from threefold.errors import ThreefoldError

pytestmark = pytest.mark.ranks


def _failed(trainer: Any) -> tuple[str, int]:
    try:
        trainer.train()
    except (ThreefoldError, KeyError) as error:
        return str(error).splitlines()[0], trainer.state.global_step
    return "no error", trainer.state.global_step


def _apart(folder: str) -> dict[str, tuple[str, int]]:
    """What is said when the second of two data ranks goes its own way."""
    import torch.distributed as dist
    from transformers import TrainerCallback

    from threefold.data.sampling.sampler import DistributedSampler
    from threefold.integrations.huggingface import Trainer

    other = dist.get_rank() == 1

    class Alone(TrainerCallback):
        def __init__(self, what: str) -> None:
            self.what = what

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if other and state.global_step == 2:
                setattr(control, self.what, True)

    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = True

    class Freezes(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            model.lm_head.requires_grad_(not other)

    class Short(DistributedSampler):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__())[: 6 if other else None])

    class Torn(Sentences):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                raise KeyError("row 9 is torn")
            return super().__getitem__(index)

    def trainer(rows: Any = None, size: int = 2, seed: int = 0, **more: Any) -> Any:
        args = arguments(
            folder,
            per_device_train_batch_size=size,
            data_seed=seed,
            gradient_accumulation_steps=2,
            max_steps=4,
            train_sampling_strategy="sequential",
        )
        rows = rows or Sentences(40)
        return Trainer(
            causal_model(), args, train_dataset=rows, eval_dataset=Sentences(4), **more
        )

    short = trainer()
    loader = short.get_train_dataloader()
    loader.sampler.__class__ = Short
    short.get_train_dataloader = lambda: loader
    names = ("should_training_stop", "should_save", "should_evaluate")
    found = {name: _failed(trainer(callbacks=[Alone(name)])) for name in names}
    found["frozen"] = _failed(trainer(callbacks=[Freezes()]))
    found["rows"] = _failed(trainer([Sentences(41)[row + other] for row in range(40)]))
    found["size"] = _failed(trainer(size=2 + other))
    found["seed"] = _failed(trainer(seed=int(other)))
    evaluating = trainer(callbacks=[Evaluates()])
    evaluating.eval_dataset = Sentences(4 + other)
    found["held out"] = _failed(evaluating)
    return {**found, "uneven": _failed(short), "torn": _failed(trainer(Torn(40)))}


def test_a_data_rank_that_goes_its_own_way_is_named(tmp_path: Path) -> None:
    first, last = run_ranks(_apart, 2, str(tmp_path), timeout_s=60)
    apart = "ranks are not in the same call: rank 0 is in training step 3, rank 1 in"
    for found in (first, last):
        assert found["should_training_stop"] == (f"{apart} the end of training", 2)
        assert found["should_save"] == (f"{apart} the save of step 2", 2)
        assert found["should_evaluate"] == (f"{apart} an evaluation", 2)
        for name, words in (("size", "training by 12 rows"), ("seed", "'seed': 1")):
            text, step = found[name]
            assert text.startswith("ranks are not in the same call: rank 0 is in training by 8")
            assert words in text and step == 0
        rows = "the dataset does not have the same rows on ranks 0 and 1"
        assert found["rows"] == (rows, 0) and found["held out"] == (rows, 1)
        text, step = found["frozen"]
        froze = "ranks are not in the same call: rank 0 is in training step 2, rank 1 in training step (1"
        assert text.startswith(f"{froze} parameters frozen: ") and step == 1
        pieces = "is split into 1 micro-batches on rank 1, into 2 on rank 0"
        assert found["uneven"] == (f"the batch of training step 2 {pieces}", 1)
    # Row 9 is of the fifth batch of two rows, of rank 1.
    assert last["torn"] == ("'row 9 is torn'", 1)
    assert first["torn"] == ("another rank failed in 'agreement': KeyError: 'row 9 is torn'", 1)


def _other_rows(folder: str) -> tuple[str, int]:
    """A collator that draws on its own from the third step on, on ranks that share their rows."""
    import torch
    from transformers import default_data_collator

    import threefold
    from threefold.integrations.huggingface import Trainer

    mesh = threefold.init_mesh(cp=2)
    drawn = torch.Generator().manual_seed(mesh.rank)
    batches = iter(range(100))

    def collate(rows: Any) -> Any:
        batch = default_data_collator(rows)
        hidden = (torch.rand(batch["labels"].shape, generator=drawn) < 0.5) & (
            next(batches) >= 2
        )
        return {**batch, "labels": batch["labels"].masked_fill(hidden, -100)}

    args = arguments(folder, per_device_train_batch_size=2, max_steps=4)
    found = _failed(
        Trainer(causal_model(), args, train_dataset=Sentences(40), data_collator=collate)
    )
    mesh.close()
    return found


def test_context_ranks_with_other_rows_are_named(tmp_path: Path) -> None:
    for text, step in run_ranks(_other_rows, 2, str(tmp_path), timeout_s=60):
        what = "ranks 0 and 1 belong to dp rank 0 and give different rows to training step 3"
        assert (text, step) == (f"{what}: row 0 of labels", 2)


def _other_weights(folder: str) -> str:
    """What is said at the end when the second rank has another weight after the last step, and nothing is saved."""
    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback

    from threefold.integrations.huggingface import Trainer

    class Changed(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            if state.global_step == 2 and dist.get_rank() == 1:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] += 1e-3

    args = arguments(folder, per_device_train_batch_size=2, max_steps=2)
    return _failed(
        Trainer(causal_model(), args, train_dataset=Sentences(8), callbacks=[Changed()])
    )[0]


def test_weights_that_differ_at_the_end_are_named(tmp_path: Path) -> None:
    for text in run_ranks(_other_weights, 2, str(tmp_path), timeout_s=60):
        assert "after step 2" in text and "lm_head.weight" in text, text
