"""What the Trainer refuses, word for word, and the arithmetic of its loaders."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ranks.huggingface_cases import Sentences, arguments, causal_model
from ranks.spawn import run_ranks
from threefold.data.sampling.sampler import DistributedSampler
from threefold.errors import CheckpointError, ConfigError, DataError, ThreefoldError
from threefold.integrations.huggingface import (
    AuditCallback,
    Trainer,
    checks,
    prepare_evaluation_loader,
)
from threefold.integrations.huggingface.evaluation_loader import BlockBatches, EvaluationLoader
from threefold.integrations.huggingface.loss import (
    RunningMean,
    nothing_of,
    part_of_mean,
    targets_in,
)
from threefold.integrations.huggingface.training_loader import Axis, TrainLoader


def refusal(work: Callable[[], Any]) -> list[tuple[str, str, str]]:
    with pytest.raises(ThreefoldError) as raised:
        work()
    return [(problem.what, problem.expected, problem.fix) for problem in raised.value.problems]


def test_wrapped_model_is_refused_with_the_line_to_delete() -> None:
    assert refusal(lambda: Trainer(nn.DataParallel(causal_model()))) == [
        (
            "the Trainer got a model inside DataParallel",
            "the model itself: the Trainer wraps it, and a wrapped one is saved under other names",
            "delete the line   model = DataParallel(model, ...)",
        )
    ]


def wrapped_or_sharded(folder: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    args = arguments(folder)
    found = []
    for model in (
        DistributedDataParallel(causal_model()),
        fully_shard(causal_model(), mesh=init_device_mesh("cpu", (2,))),
    ):
        try:
            Trainer(model, args)
        except ConfigError as error:
            found.append(str(error))
    return found


def test_ddp_and_fully_shard_are_refused(tmp_path: Path) -> None:
    ddp, sharded = run_ranks(wrapped_or_sharded, 2, str(tmp_path))[0]
    assert "delete the line   model = DistributedDataParallel(model, ...)" in ddp
    assert sharded.startswith("the Trainer got a model that fully_shard has sharded")
    assert "delete the line   fully_shard(model, ...)" in sharded


def group_without_launcher(folder: str) -> str:
    from transformers import TrainingArguments

    try:
        Trainer(
            causal_model(), TrainingArguments(output_dir=folder, use_cpu=True, report_to="none")
        )
    except ConfigError as error:
        return str(error)
    return ""


def test_group_that_transformers_does_not_see_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(group_without_launcher, 2, str(tmp_path)):
        assert text == (
            "the process group has 2 ranks, TrainingArguments sees 1\n"
            "  expected: the same number: otherwise every rank would train on the same rows by itself; transformers "
            "reads the launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK)\n"
            "  fix: delete the line   torch.distributed.init_process_group(...)   and start with torchrun "
            "--nproc_per_node 2 SCRIPT.py   (on CPUs with use_cpu=True)"
        )


REQUESTS = {
    "train_sampling_strategy = 'batch_rebalance'": {
        "train_sampling_strategy": "batch_rebalance"
    },
    "accelerator_config has split_batches = True": {
        "accelerator_config": {"split_batches": True}
    },
    "accelerator_config has dispatch_batches = True": {
        "accelerator_config": {"dispatch_batches": True}
    },
    "dataloader_in_order = False": {"dataloader_in_order": False, "dataloader_num_workers": 1},
}
FIXES = {
    "train_sampling_strategy = 'batch_rebalance'": 'train_sampling_strategy="group_by_length"',
    "accelerator_config has split_batches = True": "leave split_batches out of accelerator_config",
    "accelerator_config has dispatch_batches = True": "leave dispatch_batches out of accelerator_config",
    "dataloader_in_order = False": "leave dataloader_in_order out",
}


@pytest.mark.parametrize("what", REQUESTS)
def test_arguments_that_contradict_the_promises(what: str, tmp_path: Path) -> None:
    args = arguments(str(tmp_path), **REQUESTS[what])
    ((found, _, fix),) = refusal(lambda: Trainer(causal_model(), args))
    assert (found, fix) == (what, FIXES[what])


def asked(**settings: Any) -> SimpleNamespace:
    """A Trainer as `check_request` sees it."""
    usual = {
        "n_gpu": 1,
        "world_size": 1,
        "train_sampling_strategy": "random",
        "accelerator_config": None,
        "dataloader_in_order": True,
        "dataloader_num_workers": 0,
        "average_tokens_across_devices": True,
        "eval_use_gather_object": False,
        "gradient_accumulation_steps": 1,
        "deepspeed": None,
        "fsdp": False,
    }
    trainer = {"cp": 1, "sp": 1, "model": None, "engine": False}
    own = {name: settings.pop(name, value) for name, value in trainer.items()}
    return SimpleNamespace(
        accelerator=SimpleNamespace(distributed_type="MULTI_CPU"),
        args=SimpleNamespace(**{**usual, **settings}),
        model=own["model"],
        is_deepspeed_enabled=own["engine"],
        get_cp_size=lambda: own["cp"],
        get_sp_size=lambda: own["sp"],
    )


def sharded(
    plan: dict[str, str], *, tied: bool = False, vocab_size: int = 64, **sizes: int
) -> SimpleNamespace:
    config = SimpleNamespace(tie_word_embeddings=tied, vocab_size=vocab_size)
    config.distributed_config = SimpleNamespace(
        **{"tp_size": 1, "fsdp_size": 1, "pp_size": 1, **sizes}
    )
    config.get_text_config = lambda: config
    return SimpleNamespace(
        is_distributed_loading_by_transformers=True, config=config, tp_plan=plan
    )


WORDS = {
    "one process has 4 GPUs": (
        asked(n_gpu=4),
        "torchrun --nproc_per_node 4 SCRIPT.py   (or CUDA_VISIBLE_DEVICES=0 python SCRIPT.py)",
    ),
    "loss_type has 'aot'": (
        asked(loss_type=["sigmoid", "aot"]),
        "another loss_type, or trl.DPOTrainer alone",
    ),
    "deepspeed is given, but DeepSpeed is not in use": (
        asked(deepspeed={"zero_optimization": {"stage": 2}}),
        "unset ACCELERATE_USE_CPU, and on CPUs TrainingArguments(use_cpu=True)",
    ),
    "parallelism_config has cp_size = 2": (
        asked(cp=2),
        "threefold.init_mesh(cp=2) before the Trainer, which keeps every mask, and cp_size=1",
    ),
    "DistributedConfig has pp_size = 2": (
        asked(model=sharded({}, pp_size=2)),
        "DistributedConfig(tp_size=..., fsdp_size=...)",
    ),
    "gradient_accumulation_steps = 4 with tp_size = 2, and this model has k_norm, q_norm": (
        asked(
            gradient_accumulation_steps=4,
            model=sharded(
                dict.fromkeys(["a.q_norm", "a.k_norm"], "replicated_with_grad_allreduce"),
                tp_size=2,
            ),
        ),
        "gradient_accumulation_steps=1   (or tp_size=1, or threefold train --mesh.tp 2, which sums once)",
    ),
    "the embedding of 63 tokens is tied to the head, and fsdp_size = 2 does not divide it": (
        asked(model=sharded({}, tied=True, vocab_size=63, fsdp_size=2)),
        "a fsdp_size that divides it, resize_token_embeddings(pad_to_multiple_of=...) before saving the model that is "
        "loaded, or threefold train",
    ),
}


@pytest.mark.parametrize("what", WORDS)
def test_what_would_train_wrongly_without_a_word(what: str) -> None:
    trainer, fix = WORDS[what]
    ((found, _, found_fix),) = refusal(lambda: checks.check_request(trainer))
    assert (found, found_fix) == (what, fix)


def test_only_ranks_care_for_what_only_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = asked(average_tokens_across_devices=False, eval_use_gather_object=True)
    trainer.args.fsdp = True
    checks.check_request(trainer)
    trainer.args.world_size = 2
    problems = refusal(lambda: checks.check_request(trainer))
    assert [what for what, *_ in problems] == [
        "the process group has 1 ranks, TrainingArguments sees 2",
        "average_tokens_across_devices = False",
        "eval_use_gather_object = True",
        "fsdp is given, but on CPUs accelerate trains with plain DDP",
    ]
    assert problems[1][2] == "leave average_tokens_across_devices out"
    assert (
        problems[2][2]
        == "leave eval_use_gather_object out, and pad in preprocess_logits_for_metrics"
    )


def trained(folder: Path, **settings: Any) -> Trainer:
    usual = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = Trainer(
        causal_model(),
        arguments(str(folder), **{**usual, **settings}),
        train_dataset=Sentences(16),
    )
    trainer.train()
    return trainer


def test_resume_refuses_what_it_cannot_go_on_from(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    trainer = Trainer(causal_model(), arguments(str(empty)), train_dataset=Sentences(16))
    assert refusal(lambda: trainer.train(resume_from_checkpoint=True)) == [
        (
            f"resume_from_checkpoint = True, but {empty} has no complete checkpoint",
            "a folder checkpoint-STEP with a complete trainer_state.json, which is written last",
            "trainer.train() to begin, or resume_from_checkpoint=PATH",
        )
    ]
    trained(tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    again = Trainer(
        causal_model(), arguments(str(tmp_path), data_seed=9), train_dataset=Sentences(16)
    )
    ((what, _, fix),) = refusal(lambda: again.train(resume_from_checkpoint=True))
    assert what == "the saved state has seed = 42, but here seed = 9"
    assert (
        fix
        == "pass the seed that the run began with (TrainingArguments(data_seed=...): 42), or start a new run"
    )
    (checkpoint / "threefold.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"threefold.json cannot be read \(JSONDecodeError"
    ):
        again.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / "threefold.json").unlink()
    ((what, _, fix),) = refusal(lambda: again.train(resume_from_checkpoint=str(checkpoint)))
    assert what == f"{checkpoint} has no threefold.json: another Trainer saved it"
    assert fix.startswith(
        "TrainingArguments(ignore_data_skip=True) keeps these weights and begins the epoch"
    )
    anew = Trainer(
        causal_model(),
        arguments(str(tmp_path), ignore_data_skip=True, max_steps=3),
        train_dataset=Sentences(16),
    )
    assert anew.train(resume_from_checkpoint=str(checkpoint)).global_step == 3


def test_weights_alone_are_not_resumed_from(tmp_path: Path) -> None:
    """transformers would continue with a new optimizer and schedule, without a word."""
    trained(tmp_path, save_only_model=True)
    again = Trainer(
        causal_model(), arguments(str(tmp_path), max_steps=3), train_dataset=Sentences(16)
    )
    ((what, _, fix),) = refusal(lambda: again.train(resume_from_checkpoint=True))
    assert what == f"{tmp_path / 'checkpoint-2'} has weights, but no state of the optimizer"
    assert fix.startswith("save with save_only_model=False")


def test_true_resumes_from_the_newest_that_was_written_to_its_end(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=4)
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"global')
    again = Trainer(
        causal_model(), arguments(str(tmp_path), max_steps=3), train_dataset=Sentences(16)
    )
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    assert [line["train_loss"] for line in again.state.log_history if "train_loss" in line]


def test_record_and_checkpoint_that_disagree_are_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    path = tmp_path / "checkpoint-2" / "threefold.json"
    path.write_text(path.read_text().replace('"position": 8', '"position": 12'))
    again = Trainer(
        causal_model(),
        arguments(str(tmp_path), per_device_train_batch_size=4),
        train_dataset=Sentences(16),
    )
    ((what, _, fix),) = refusal(lambda: again.train(resume_from_checkpoint=True))
    assert what.startswith(
        "step 3 would begin at position 12 of epoch 0, but by audit.jsonl step 2 ended at position 8 of epoch 0: rows"
    )
    assert what.endswith("would be left out")
    assert fix == "resume from an older checkpoint, or begin in another output_dir"


def test_audit_is_there_once_and_can_be_replaced(tmp_path: Path) -> None:
    usual = Trainer(causal_model(), arguments(str(tmp_path)))
    own = Trainer(causal_model(), arguments(str(tmp_path)), callbacks=[AuditCallback(every=50)])
    for trainer, every in ((usual, 10), (own, 50)):
        (audit,) = [
            one for one in trainer.callback_handler.callbacks if isinstance(one, AuditCallback)
        ]
        assert audit.every == every


def test_signature_is_transformers() -> None:
    import inspect

    import transformers

    assert inspect.signature(Trainer) == inspect.signature(transformers.Trainer)


def test_evaluation_loader_refuses_what_it_cannot_keep() -> None:
    accelerator = Accelerator(cpu=True)
    ((what, _, fix),) = refusal(
        lambda: prepare_evaluation_loader(accelerator, DataLoader(Sentences(4), shuffle=True))
    )
    assert what == "the evaluation loader draws its rows with a RandomSampler"
    assert fix == "DataLoader(dataset, batch_size=...) without shuffle and sampler"


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", range(1, 20))
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_blocks_are_every_row_once_in_order(
    num_rows: int, batch_size: int, dp_size: int
) -> None:
    ranks = [
        list(BlockBatches(num_rows, batch_size, Axis(rank, dp_size))) for rank in range(dp_size)
    ]
    read = []
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        assert len({len(batch) for batch in of_ranks}) == 1
        assert max(map(len, of_ranks)) <= batch_size
        rows = [row for batch in of_ranks for row in batch]
        real = BlockBatches(num_rows, batch_size, Axis(0, dp_size)).real(step)
        read += rows[:real]
        assert all(row < 0 for row in rows[real:])
        assert len(rows) - real < dp_size
    assert read == list(range(num_rows))


@pytest.mark.parametrize("tail", ["exact", "drop"])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_shares_of_an_epoch_from_any_place(dp_size: int, tail: str) -> None:
    for begin in (0, 6, 12, 18):
        shares = []
        for rank in range(dp_size):
            settings = {
                "num_replicas": dp_size,
                "rank": rank,
                "seed": 1,
                "shuffle": False,
                "tail": tail,
            }
            sampler = DistributedSampler.for_loop(
                range(20), global_batch=6, stand_in=operator.invert, **settings
            )
            sampler.load_state_dict({**sampler.state_dict(), "position": begin})
            sampler.open_pass()
            shares.append(list(sampler))
            assert sampler.rows_left() == len(shares[-1])
        assert len({len(share) for share in shares}) == 1
        read = sorted(index for share in shares for index in share if index >= 0)
        assert read == list(range(begin, 20 if tail == "exact" else 18))


def test_loaders_hand_out_what_collate_made() -> None:
    accelerator = Accelerator(cpu=True)
    settings = {"num_replicas": 2, "rank": 1, "seed": 0, "shuffle": False, "tail": "exact"}
    order = DistributedSampler.for_loop(
        range(5), global_batch=2, stand_in=operator.invert, **settings
    )
    loader = TrainLoader(
        range(5),
        order,
        batch_size=1,
        accelerator=accelerator,
        axis=Axis(1, 2),
        collate_fn=torch.tensor,
    )
    taken = loader.watch()
    given = []
    for batch in loader:
        given.append(batch.tolist())
        assert accelerator.gradient_state.end_of_dataloader == (len(given) == 3)
    # Rank 1 has no third sample: the head stands in, and is no row.
    assert given == [[1], [3], [0]]
    assert list(taken) == [(1,), (3,), ()]
    assert [(batch.rows, batch.rest) for batch in loader.returned] == [
        (1, None),
        (1, None),
        (0, None),
    ]
    assert loader.dataset.stop == 5
    evaluation = EvaluationLoader(
        range(3),
        batch_size=2,
        accelerator=accelerator,
        axis=Axis(0, 1),
        collate_fn=torch.tensor,
    )
    assert [evaluation.gather(batch).tolist() for batch in evaluation] == [[0, 1], [2]]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [*range(1, 14), 64])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_batches_of_all_ranks_have_one_size_and_every_row_once(
    num_rows: int, batch_size: int, dp_size: int
) -> None:
    accelerator, ranks = Accelerator(cpu=True), []
    for rank in range(dp_size):
        marks = {"stand_in": operator.invert, "alone": partial(operator.add, num_rows)}
        sizes = {"num_replicas": dp_size, "rank": rank, "global_batch": dp_size * batch_size}
        order = DistributedSampler.for_loop(
            range(num_rows), seed=1, tail="exact", **marks, **sizes
        )
        made = {
            "batch_size": batch_size,
            "accelerator": accelerator,
            "axis": Axis(rank, dp_size),
        }
        loader = TrainLoader(range(num_rows), order, collate_fn=torch.tensor, **made)
        batches = [batch.tolist() for batch in loader]
        ranks.append(list(zip(batches, loader.returned, strict=True)))
    read = []
    for of_ranks in zip(*ranks, strict=True):
        assert len({(len(batch), got.alone, got.rest is None) for batch, got in of_ranks}) == 1
        for batch, got in of_ranks:
            read += batch[: got.rows] + (got.rest.tolist() if got.rest_rows else [])
            assert got.rows == len(batch) or (len(batch) == 1 and got.alone and not got.rows)
    assert sorted(read) == list(range(num_rows))


def test_loss_of_parts_is_the_mean_of_the_whole() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 5, requires_grad=True)
    labels = torch.randint(5, (12,))
    labels[[0, 1, 2, 7]] = -100
    whole = nn.functional.cross_entropy(logits, labels)
    (wanted,) = torch.autograd.grad(whole, logits)
    parts = []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 12)):  # the first has no target
        loss = nn.functional.cross_entropy(logits[rows], labels[rows])
        count = int(targets_in({"labels": labels[rows]}, shifts_labels=False))
        parts.append(
            part_of_mean(loss, {"logits": logits[rows]}, targets=count, all_targets=8, ranks=1)
        )
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    (found,) = torch.autograd.grad(torch.stack(parts).sum(), logits)
    torch.testing.assert_close(found, wanted)
    assert nothing_of({"loss": whole}, whole).item() == 0


def test_targets_of_batches() -> None:
    labels = torch.tensor([[1, -100, 2], [3, 4, 5]])
    assert targets_in({"labels": labels}, shifts_labels=False) == 5
    assert targets_in({"labels": labels}, shifts_labels=True) == 3
    assert targets_in({"labels": labels, "shift_labels": labels}, shifts_labels=True) == 5
    assert targets_in({"labels": torch.rand(2, 3)}, shifts_labels=False) == 6
    assert targets_in({"pixel_values": torch.rand(4, 3)}, shifts_labels=False) == 4


def test_mean_without_targets_is_not_a_number() -> None:
    accelerator = Accelerator(cpu=True)
    mean = RunningMean(accelerator.device)
    assert mean.over_ranks(accelerator) is None
    mean.add(torch.tensor(float("nan")), 0)
    assert mean.over_ranks(accelerator) != mean.over_ranks(accelerator)
    mean.add(torch.tensor(2.0), 3)
    assert mean.over_ranks(accelerator) == 2.0


def test_another_order_is_refused_in_the_trainers_words() -> None:
    from threefold.integrations.huggingface.trainer_checkpoint import check_order

    order = DistributedSampler.for_loop(
        range(5), global_batch=1, num_replicas=1, rank=0, seed=0, tail="exact"
    )
    other = DistributedSampler.for_loop(
        range(6), global_batch=1, num_replicas=1, rank=0, seed=0, tail="exact"
    )
    with pytest.raises(
        DataError, match="the saved state has num_rows = 6, but here num_rows = 5"
    ):
        check_order(other.state_dict(), loader=order)


def test_transformers_with_another_loop_is_refused() -> None:
    assert refusal(lambda: checks.check_version(type("Trainer", (), {}), "9.9")) == [
        (
            "transformers 9.9 has no Trainer._build_accelerator_args",
            "a version whose loop this Trainer supports: with another its guarantees would not hold",
            "pip install 'transformers==5.23.*'",
        )
    ]
