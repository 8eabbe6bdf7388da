"""A request for a run, checked with everything that is known before the first collective."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial

from transformers import PretrainedConfig

from threefold.checkpoint.manifest import architecture_problems
from threefold.config.schema import Config
from threefold.data.partition import check_global_batch
from threefold.data.tokens import Tokenizer, load_tokenizer
from threefold.errors import ConfigError, Problem
from threefold.integrations import trackers
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import data_parallel, fused_loss, load, lora
from threefold.model.context_parallel import flex, limits
from threefold.model.context_parallel.split import split_problems
from threefold.model.head import first_position
from threefold.model.tensor_parallel.plan import expert_problems, plan_problems


def tokenizer_name(config: Config) -> tuple[str, str]:
    """Returns the tokenizer's name, and the reason for it."""
    if config.data.tokenizer is not None:
        return config.data.tokenizer, "as given"
    if config.model.name_or_path is not None:
        return config.model.name_or_path, "the model's own"
    return "bytes", "the model has random weights and none was given"


def tokenizer_of(config: Config) -> Tokenizer:
    """Returns the tokenizer that the config asks for."""
    name, _ = tokenizer_name(config)
    revision = config.model.revision if name == config.model.name_or_path else None
    return load_tokenizer(name, revision=revision)


@dataclass(frozen=True)
class Asked:
    """A request that was checked and can be met."""

    config: Config
    tokenizer: Tokenizer
    architecture: PretrainedConfig


def asked_of(config: Config, mesh: Mesh) -> Asked:
    """Returns what the config asks for; every rank finds the same, before the first collective.

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
    """Checks everything about the model, the batch and the mesh that is known before the first collective.

    Raises:
        ConfigError: all that is wrong, at once.
    """
    problems = _batch_problems(config, topology)
    outline = load.outline(architecture, trust_remote_code=config.model.trust_remote_code)
    problems += plan_problems(architecture, topology.tp, plan=outline.tp_plan)
    problems += expert_problems(architecture, config.mesh.ep, topology.tp)
    problems += split_problems(config.mesh.cp_method, architecture, topology, outline)
    problems += limits.direction_problems(outline, pretrained=config.model.name_or_path is not None)
    problems += limits.document_problems(outline) if config.data.document_mask else []
    problems += architecture_problems(architecture)
    problems += data_parallel.problems(config.mesh, topology, device=device)
    if config.log.trackers:
        problems += trackers.problems(config.log.trackers)
    if config.model.attention == "flex":
        problems += flex.problems("flex", architecture, device=device)
    if config.train.fused_loss == "liger":
        smoothing = config.train.label_smoothing
        problems += fused_loss.problems("liger", device=device, tp=topology.tp, label_smoothing=smoothing)
    if config.model.lora.r:
        build = partial(load.build_without_storage, attention="eager", trust_remote_code=config.model.trust_remote_code)
        name = architecture.model_type
        problems += lora.problems(config.model.lora, lambda: build(copy.deepcopy(architecture)), name=name)
    text = architecture.get_text_config()
    if (known := getattr(text, "vocab_size", None)) is not None and known < tokenizer.vocab_size:
        what = f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens, the model only {known}"
        fix = f"--model.config '{{..., vocab_size: {tokenizer.vocab_size}}}', or the model's own tokenizer"
        problems.append(Problem(what, "an embedding for every token that the tokenizer can produce", fix))
    longest, seq_len = getattr(text, "max_position_embeddings", None), config.data.seq_len
    if isinstance(longest, int):
        longest -= first_position(outline)
    if isinstance(longest, int) and 0 < longest < seq_len:
        what = f"data.seq_len = {seq_len}, but the model supports at most {longest} positions"
        expected = "rows that are no longer than the model's max_position_embeddings"
        problems.append(Problem(what, expected, f"--data.seq_len {longest}"))
    if problems:
        raise ConfigError.of(problems)


def _batch_problems(config: Config, topology: Topology) -> list[Problem]:
    problems: list[Problem] = []
    cp, tp, size = topology.cp, topology.tp, config.train.micro_batch
    rows, left = divmod(config.train.global_batch, topology.dp)
    try:
        check_global_batch(config.train.global_batch, dp_size=topology.dp)
    except ConfigError as error:
        problems += error.problems
    if not left and size != "auto" and rows % size:
        divisor = max(each for each in range(1, rows + 1) if rows % each == 0 and each <= size)
        what = f"train.micro_batch = {size} does not divide the {rows} rows of a dp rank"
        problems.append(Problem(what, "micro-batches of equal size", f"--train.micro_batch {divisor}   (or auto)"))
    seq_len, unit, split = config.data.seq_len, 2 * cp if cp > 1 else 1, config.mesh.sequence_parallel is True
    if split and seq_len % (cp * tp):
        unit = math.lcm(cp * tp, unit)
        what = f"data.seq_len = {seq_len} cannot be shared by {cp} cp x {tp} tp ranks"
        expected = f"a multiple of {unit}, so that each tp rank has an equal part between the layers"
        fix = f"--data.seq_len {-(-seq_len // unit) * unit}   (or --mesh.sequence_parallel false)"
        problems.append(Problem(what, expected, fix))
    elif seq_len % unit:
        what = f"data.seq_len = {seq_len} cannot be split over {cp} cp ranks"
        expected = f"a multiple of 2 x mesh.cp ({unit}): each rank takes a chunk of the head and one of the tail"
        problems.append(Problem(what, expected, f"--data.seq_len {-(-seq_len // unit) * unit}"))
    return problems
