"""The audit in transformers' loop: faults planted under our Trainer, and what transformers' own Trainer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.huggingface_cases import Sentences, arguments, causal_model
from ranks.spawn import run_ranks
from ranks.test_huggingface_training import stopper
from threefold.errors import RunError, ThreefoldError

pytestmark = pytest.mark.ranks


def run_with_fault(folder: str, fault: str) -> tuple[str, int] | None:
    import torch.distributed as dist

    from threefold.data.sampling.sampler import DistributedSampler
    from threefold.integrations.huggingface import AuditCallback, Trainer

    class Faulty(DistributedSampler):
        """Reads wrongly from the third batch of 2 rows on."""

        def __iter__(self) -> Any:
            own = list(super().__iter__())
            if fault == "another rank":
                return iter(
                    list(range(self.epoch_size))[1 - self.rank :: 2]
                    if not self.shuffle
                    else own
                )
            if fault == "again":
                return iter(own[:4] + own[2:4] + own[6:])
            return iter(own[:4] + own[6:] + own[4:6])

    args = arguments(
        folder, per_device_train_batch_size=2, max_steps=6, train_sampling_strategy="sequential"
    )
    trainer = Trainer(
        causal_model(), args, train_dataset=Sentences(40), callbacks=[AuditCallback(every=2)]
    )
    loader = trainer.get_train_dataloader()
    loader.sampler.__class__ = Faulty
    trainer.get_train_dataloader = lambda: loader  # type: ignore[method-assign]
    if fault == "another rank" and dist.get_rank() == 0:
        loader.sampler.__class__ = DistributedSampler
    try:
        trainer.train()
    except RunError as error:
        return str(error), trainer.state.global_step
    return None


FAULTS = {
    "again": (
        4,
        "ranks 0 and 1 read the batch of step 2 again in step 3: on rank 0 rows 4, 6 instead of rows 8, 10",
    ),
    "left out": (
        4,
        "ranks 0 and 1 read the batch of step 4 in step 3: the batch of step 3 was left out",
    ),
    "another rank": (
        2,
        "rank 1 (dp rank 1, cp rank 0, tp rank 0) read the samples of dp rank 0 in step 1",
    ),
}


def run_with_faults(folder: str) -> dict[str, tuple[str, int] | None]:
    return {fault: run_with_fault(f"{folder}/{fault}", fault) for fault in FAULTS}


def test_audit_stops_on_all_ranks_and_names_the_step(tmp_path: Path) -> None:
    for of_rank in run_ranks(run_with_faults, 2, str(tmp_path)):
        for fault, (step, text) in FAULTS.items():
            found = of_rank[fault]
            assert found is not None
            assert found[1] == step
            assert text in found[0]
            assert "--data." not in found[0]
            assert text in (tmp_path / fault / "audit.jsonl").read_text()


def masks_at_random(folder: str) -> str:
    """A collator that draws on its own, under tensor parallelism: the ranks of one model would see other tokens."""
    import torch
    from transformers import AutoModelForCausalLM, default_data_collator
    from transformers.distributed import DistributedConfig

    from ranks.huggingface_cases import join_launcher
    from threefold.integrations.huggingface import Trainer

    def collate(rows: list[Any]) -> Any:
        batch = default_data_collator(rows)
        hidden = torch.rand(batch["input_ids"].shape, generator=generator) < 0.2
        return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 0)}

    join_launcher()
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2)
    )
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    args = arguments(f"{folder}/run", per_device_train_batch_size=2, max_steps=10)
    trainer = Trainer(model, args, train_dataset=Sentences(40), data_collator=collate)
    try:
        trainer.train()
    except ThreefoldError as error:
        return str(error)
    return ""


def test_ranks_of_one_model_that_see_other_tokens_are_found(tmp_path: Path) -> None:
    causal_model().save_pretrained(tmp_path)
    for text in run_ranks(masks_at_random, 2, str(tmp_path)):
        first = "ranks 0 and 1 belong to dp rank 0 and give different rows to training step 1"
        assert text.splitlines()[0] == f"{first}: row 0 of input_ids"


def run_transformers(
    folder: str, batch_size: int, size: int, more: dict[str, Any]
) -> tuple[str, int, list[str]]:
    """transformers' own Trainer with our callback: the error, the step and what was logged."""
    import logging

    import transformers

    from threefold.integrations.huggingface import AuditCallback

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    logging.getLogger("threefold").addHandler(handler)
    resume, stop = more.pop("resume", None), more.pop("stop_after", None)
    args = arguments(folder, per_device_train_batch_size=batch_size, num_train_epochs=1, **more)
    trainer = transformers.Trainer(
        causal_model(), args, train_dataset=Sentences(size), callbacks=[AuditCallback(every=1)]
    )
    if stop is not None:
        trainer.add_callback(stopper(stop))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except RunError as error:
        return str(error), trainer.state.global_step, said
    return "", trainer.state.global_step, said


def run_twice(folder: str, workers: int) -> list[tuple[str, int, list[str]]]:
    more = {"dataloader_num_workers": workers}
    return [
        run_transformers(folder, 4, 48, dict(more)),
        run_transformers(folder, 2, 7, dict(more)),
    ]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.examples)])
def test_callback_alone_counts_what_another_trainer_reads(workers: int, tmp_path: Path) -> None:
    for whole, filled in run_ranks(run_twice, 2, str(tmp_path), workers):
        assert whole[:2] == ("", 6)
        assert filled[:2] == ("", 2)
        assert any(
            "epoch 0 ended with row" in line and "read for the second time" in line
            for line in filled[2]
        )


def stop_and_resume(folder: str) -> list[tuple[str, int, list[str]]]:
    """transformers' own Trainer: stopped after 3 steps of 8 rows, resumed with 8 and with 4 rows."""
    more = {"save_strategy": "steps", "save_steps": 100}
    run_transformers(folder, 4, 48, {**more, "stop_after": 3})
    resume = {**more, "resume": f"{folder}/checkpoint-3"}
    return [run_transformers(folder, batch_size, 48, dict(resume)) for batch_size in (4, 2)]


def test_callback_alone_finds_what_transformers_repeats_after_a_resume(tmp_path: Path) -> None:
    for same, half in run_ranks(stop_and_resume, 2, str(tmp_path)):
        assert same[:2] == ("", 6)
        assert half[1] in (3, 4)
        assert "epoch 0 had read it already" in half[0]
        assert (
            "resumes at the next sample with any number of ranks and any batch size" in half[0]
        )


def with_a_loader_of_ones_own(folder: str) -> tuple[str, int]:
    from torch.utils.data import DataLoader

    import threefold
    from threefold.errors import ConfigError
    from threefold.integrations.huggingface import Trainer

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=2, shuffle=True)

    class Shared(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler = threefold.DistributedSampler(self.train_dataset, seed=1)
            return DataLoader(self.train_dataset, batch_size=2, sampler=sampler)

    args = arguments(folder, max_steps=2)
    shared = Shared(causal_model(), args, train_dataset=Sentences(12))
    steps = shared.train().global_step
    try:
        Plain(causal_model(), args, train_dataset=Sentences(12)).train()
    except ConfigError as error:
        return str(error), steps
    return "", steps


def test_a_loader_of_ones_own_must_read_its_ranks_share(tmp_path: Path) -> None:
    for text, steps in run_ranks(with_a_loader_of_ones_own, 2, str(tmp_path)):
        assert steps == 2
        assert text.startswith(
            "the training loader (DataLoader) has no distributed sampler, and there are 2 ranks"
        )
