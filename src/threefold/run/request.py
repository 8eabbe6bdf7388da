"""What a run is asked for, and whether it can be done: all that is known before anything is sent."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial

from transformers import PretrainedConfig

from threefold.config.schema import Config
from threefold.data.tokens import Tokenizer, load_tokenizer
from threefold.errors import ConfigError, Problem
from threefold.integrations import trackers
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import data_parallel, load
from threefold.model.context_parallel.split import split_problems
from threefold.model.tensor_parallel.plan import expert_problems, plan_problems


def tokenizer_name(config: Config) -> tuple[str, str]:
    """(name of the tokenizer, why)."""
    if config.data.tokenizer is not None:
        return config.data.tokenizer, "as given"
    if config.model.name_or_path is not None:
        return config.model.name_or_path, "the model's own"
    return "bytes", "the model has random weights and none was given"


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer that the config asks for."""
    name, _ = tokenizer_name(config)
    revision = config.model.revision if name == config.model.name_or_path else None
    return load_tokenizer(name, revision=revision)


@dataclass(frozen=True)
class Asked:
    """A request that was looked at, and found to be one that can be met."""

    config: Config
    tokenizer: Tokenizer
    architecture: PretrainedConfig


def asked_of(config: Config, mesh: Mesh) -> Asked:
    """What the config asks for; every rank finds the same, before anything is sent.

    Raises:
        ConfigError: all that is wrong with the model, the batch and the mesh, at once.
    """
    tokenizer = tokenizer_of(config)
    architecture = load.read_config(config.model, vocab_size=tokenizer.vocab_size)
    check(config, architecture, tokenizer, mesh.topology, device=mesh.device.type)
    return Asked(config, tokenizer, architecture)


def check(
    config: Config, architecture: PretrainedConfig, tokenizer: Tokenizer, topology: Topology, *, device: str
) -> None:
    """Everything about the model, the batch and the mesh that can be known before anything is sent.

    Args:
        device: `cpu` or `cuda`, what the ranks compute on.

    Raises:
        ConfigError: all that is wrong, at once.
    """
    problems = _batch_problems(config, topology)
    plan = load.plan_of(architecture, trust_remote_code=config.model.trust_remote_code)
    problems += plan_problems(architecture, topology.tp, plan=plan)
    problems += expert_problems(architecture, config.mesh.ep, topology.tp)
    problems += split_problems(config.mesh.cp_method, architecture, topology)
    problems += data_parallel.problems(config.mesh, topology, device=device)
    problems += trackers.problems(config.log.trackers)
    if config.model.attention == "flex":
        from threefold.model.context_parallel import flex

        problems += flex.problems("flex", architecture, device=device)
    if config.train.fused_loss == "liger":
        from threefold.model import fused_loss

        smoothing = config.train.label_smoothing
        problems += fused_loss.problems("liger", device=device, tp=topology.tp, label_smoothing=smoothing)
    if config.model.lora.r:
        from threefold.model import lora

        build = partial(load.build_without_storage, attention="eager", trust_remote_code=config.model.trust_remote_code)
        name = architecture.model_type
        problems += lora.problems(config.model.lora, lambda: build(copy.deepcopy(architecture)), name=name)
    text = architecture.get_text_config()
    if (known := getattr(text, "vocab_size", None)) is not None and known < tokenizer.vocab_size:
        problems.append(
            Problem(
                f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens, the model only {known}",
                "an embedding for every token that the tokenizer can give",
                f"--model.config '{{..., vocab_size: {tokenizer.vocab_size}}}', or the model's own tokenizer",
            )
        )
    longest = getattr(text, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < config.data.seq_len:
        problems.append(
            Problem(
                f"data.seq_len = {config.data.seq_len}, but the model knows {longest} positions",
                "rows that are no longer than the model's max_position_embeddings",
                f"--data.seq_len {longest}",
            )
        )
    if problems:
        raise ConfigError.of(problems)


def _batch_problems(config: Config, topology: Topology) -> list[Problem]:
    problems = []
    rows, dp, cp = config.train.global_batch, topology.dp, topology.cp
    if rows % dp:
        below = rows // dp * dp
        problems.append(
            Problem(
                f"train.global_batch = {rows} cannot be divided equally among {dp} dp ranks",
                f"a multiple of mesh.dp ({dp}), so that every dp rank makes the same number of steps",
                f"--train.global_batch {-(-rows // dp) * dp}" + (f"   (or {below})" if below else ""),
            )
        )
    elif config.train.micro_batch != "auto" and (rows // dp) % config.train.micro_batch:
        problems.append(
            Problem(
                f"train.micro_batch = {config.train.micro_batch} does not divide the {rows // dp} rows of a dp rank",
                "micro-batches of equal size",
                f"--train.micro_batch {_divisor(rows // dp, config.train.micro_batch)}   (or auto)",
            )
        )
    if config.mesh.sequence_parallel is True and config.data.seq_len % (cp * topology.tp):
        unit = math.lcm(cp * topology.tp, 2 * cp if cp > 1 else 1)
        problems.append(
            Problem(
                f"data.seq_len = {config.data.seq_len} cannot be shared by {cp} cp x {topology.tp} tp ranks",
                f"a multiple of {unit}, so that each tp rank has an equal part between the layers",
                f"--data.seq_len {-(-config.data.seq_len // unit) * unit}   (or --mesh.sequence_parallel false)",
            )
        )
    elif cp > 1 and config.data.seq_len % (2 * cp):
        unit = 2 * cp
        problems.append(
            Problem(
                f"data.seq_len = {config.data.seq_len} cannot be split over {cp} cp ranks",
                f"a multiple of 2 x mesh.cp ({unit}): each rank takes a chunk of the head and one of the tail",
                f"--data.seq_len {-(-config.data.seq_len // unit) * unit}",
            )
        )
    return problems


def _divisor(count: int, at_most: int) -> int:
    return max(size for size in range(1, count + 1) if count % size == 0 and size <= at_most)
