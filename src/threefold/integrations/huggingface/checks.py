"""Limits of the Trainer, reported before anything is computed, with the line to change.

Every check uses facts that all ranks have, so either all ranks continue or all stop. If transformers would silently do
something else, the error names it.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from threefold.errors import ConfigError, Problem
from threefold.integrations.huggingface import context_parallel

# The private methods of transformers' loop that ours overrides; all supported versions have the public ones.
_HOOKS = (
    "_build_accelerator_args",
    "_get_dataloader",
    "_get_num_items_in_batch",
    "_init_training_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_prepare_for_training",
    "_run_epoch",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_track_num_input_tokens",
)


# TRL's Trainers whose loss is a mean over targets (SFT) or over rows (the others).
_OF_TRL = {"SFTTrainer", "DPOTrainer", "RewardTrainer"}


def check_version(trainer: type, version: str) -> None:
    """Refuses a transformers whose loop lacks a method that ours overrides (ConfigError)."""
    if missing := [name for name in _HOOKS if not hasattr(trainer, name)]:
        raise ConfigError(
            f"transformers {version} has no Trainer.{missing[0]}",
            expected="a version whose loop this Trainer supports: with another its guarantees would not hold",
            fix="pip install 'transformers==5.23.*'",
        )


def check_class(trainer: type) -> bool:
    """Whether a Trainer is composed with one of TRL's, whose losses have no outputs without another forward pass.

    Raises:
        ConfigError: with one whose loss is no mean over targets or rows.
    """
    of_trl = [kind.__name__ for kind in trainer.__mro__ if kind.__module__.startswith("trl.")]
    if of_trl and not _OF_TRL.intersection(of_trl):
        raise ConfigError(
            f"the Trainer is composed with TRL's {of_trl[0]}",
            expected=f"one of {', '.join(sorted(_OF_TRL))}: the loss of others is not a mean over targets or rows, or "
            "their samplers draw in a way that is not known, so that no guarantee of this Trainer would hold",
            fix=f"use trl.{of_trl[0]} alone, with callbacks=[AuditCallback()]",
        )
    return bool(of_trl)


def check_model(model: Any) -> None:
    """Refuses a model that is already wrapped or sharded for data parallelism (ConfigError)."""
    if isinstance(model, (DistributedDataParallel, DataParallel, FullyShardedDataParallel)):
        name = type(model).__name__
        raise ConfigError(
            f"the Trainer got a model inside {name}",
            expected="the model itself: the Trainer wraps it, and a wrapped one is saved under other names",
            fix=f"delete the line   model = {name}(model, ...)",
        )
    if isinstance(model, FSDPModule) and not getattr(
        model, "is_distributed_loading_by_transformers", False
    ):
        raise ConfigError(
            "the Trainer got a model that fully_shard has sharded",
            expected="a model that the Trainer shards (fsdp in the arguments), or one that transformers loaded in "
            "shards",
            fix="delete the line   fully_shard(model, ...)   and load with "
            "from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=...)), or pass fsdp=True",
        )


def check_request(trainer: Any) -> None:
    """Refuses arguments that contradict what the Trainer promises, all at once (ConfigError)."""
    args, model = trainer.args, trainer.model
    problems = (
        _processes(args),
        _reading(args),
        _parallelism(trainer),
        _sharded(model, args),
        context_parallel.problems(trainer),
    )
    ConfigError.raise_for(itertools.chain.from_iterable(problems))


def _processes(args: Any) -> Iterator[Problem]:
    if args.n_gpu > 1:
        yield Problem(
            f"one process has {args.n_gpu} GPUs",
            "one process per GPU: transformers would use torch.nn.DataParallel, which averages the losses of unequal "
            "parts",
            f"torchrun --nproc_per_node {args.n_gpu} SCRIPT.py   (or CUDA_VISIBLE_DEVICES=0 python SCRIPT.py)",
        )
    joined = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if joined != args.world_size:
        yield Problem(
            f"the process group has {joined} ranks, TrainingArguments sees {args.world_size}",
            "the same number: otherwise every rank would train on the same rows by itself; transformers reads the "
            "launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK)",
            "delete the line   torch.distributed.init_process_group(...)   and start with "
            f"torchrun --nproc_per_node {joined} SCRIPT.py   (on CPUs with use_cpu=True)",
        )


def _reading(args: Any) -> Iterator[Problem]:
    for name in ("aot", "aot_unpaired", "sft"):  # of TRL's DPOTrainer
        if name in (getattr(args, "loss_type", None) or ()):
            yield Problem(
                f"loss_type has {name!r}",
                "a mean over pairs: this one sorts the pairs of a micro-batch, or counts its tokens, so that ranks and "
                "micro-batches would change the curve",
                "another loss_type, or trl.DPOTrainer alone",
            )
    if args.train_sampling_strategy not in ("random", "sequential", "group_by_length"):
        yield Problem(
            f"train_sampling_strategy = {args.train_sampling_strategy!r}",
            "random, sequential or group_by_length: an order that depends on the number of ranks cannot be resumed on "
            "other ranks",
            'train_sampling_strategy="group_by_length"',
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            yield Problem(
                f"accelerator_config has {name} = True",
                "this key left out: every rank reads its own rows, per_device_train_batch_size of them at a time",
                f"leave {name} out of accelerator_config",
            )
    if not args.dataloader_in_order and args.dataloader_num_workers:
        yield Problem(
            "dataloader_in_order = False",
            "batches in the sampler's order: otherwise a step reads different samples in every run, and no saved state "
            "could tell which were read",
            "leave dataloader_in_order out",
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield Problem(
            "average_tokens_across_devices = False",
            "True, the default: the loss is the sum over all target tokens of a step / their number",
            "leave average_tokens_across_devices out",
        )
    if args.world_size > 1 and args.eval_use_gather_object:
        yield Problem(
            "eval_use_gather_object = True",
            "tensors with one row per sample: only these can be put into the dataset's order",
            "leave eval_use_gather_object out, and pad in preprocess_logits_for_metrics",
        )


def _parallelism(trainer: Any) -> Iterator[Problem]:
    """Ways to shard that accelerate silently leaves out, or that train something else."""
    if trainer.args.deepspeed and not trainer.is_deepspeed_enabled:
        yield Problem(
            "deepspeed is given, but DeepSpeed is not in use",
            "its engine: with ACCELERATE_USE_CPU set, accelerate silently trains with plain DDP",
            "unset ACCELERATE_USE_CPU, and on CPUs TrainingArguments(use_cpu=True)",
        )
    if (
        trainer.args.fsdp
        and trainer.args.world_size > 1
        and trainer.accelerator.distributed_type == "MULTI_CPU"
    ):
        yield Problem(
            "fsdp is given, but on CPUs accelerate trains with plain DDP",
            "sharded weights, as requested: each rank would silently hold all of them",
            "from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=...)), which shards on CPUs too, "
            "or leave fsdp out",
        )
    for name, size in (("cp_size", trainer.get_cp_size()), ("sp_size", trainer.get_sp_size())):
        if size > 1:
            yield Problem(
                f"parallelism_config has {name} = {size}",
                "1: accelerate drops a layer's mask there and attends causally, so packed rows, padding and "
                "windows would be ignored",
                f"threefold.init_mesh(cp={size}) before the Trainer, which keeps every mask, and {name}=1",
            )


def _sharded(model: Any, args: Any) -> Iterator[Problem]:
    """Models that transformers has loaded in shards, and would silently train wrongly."""
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return
    asked = model.config.distributed_config
    config = model.config.get_text_config()
    if asked.pp_size > 1:
        yield Problem(
            f"DistributedConfig has pp_size = {asked.pp_size}",
            "1: the Trainer has no schedule for pipeline stages",
            "DistributedConfig(tp_size=..., fsdp_size=...)",
        )
    if (
        asked.tp_size > 1
        and args.gradient_accumulation_steps > 1
        and (layers := _reduced_again(model))
    ):
        yield Problem(
            f"gradient_accumulation_steps = {args.gradient_accumulation_steps} with tp_size = {asked.tp_size}, and "
            f"this model has {layers}",
            "one micro-batch per step: transformers sums the gradient of these layers over tp again at every "
            "micro-batch, which would make it several times too large",
            "gradient_accumulation_steps=1   (or tp_size=1, or threefold train --mesh.tp "
            f"{asked.tp_size}, which sums once)",
        )
    if (
        asked.fsdp_size > 1
        and config.tie_word_embeddings
        and config.vocab_size % asked.fsdp_size
    ):
        yield Problem(
            f"the embedding of {config.vocab_size} tokens is tied to the head, and fsdp_size = {asked.fsdp_size} "
            "does not divide it",
            "a size that divides it: transformers would manage this weight twice, and the loss would drift from the "
            "second step on",
            "a fsdp_size that divides it, resize_token_embeddings(pad_to_multiple_of=...) before saving the model "
            "that is loaded, or threefold train",
        )


def _reduced_again(model: nn.Module) -> str:
    """The kinds of layers whose gradients a plan of transformers reduces in a hook; `` if there are none."""
    return ", ".join(
        sorted(
            name.split(".")[-1]
            for name, style in (getattr(model, "tp_plan", None) or {}).items()
            if "with_grad_allreduce" in style
        )
    )
