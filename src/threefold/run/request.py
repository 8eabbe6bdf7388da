"""A request for a run, checked with everything that is known before the first collective."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from threefold.checkpoint.manifest import architecture_problems
from threefold.config.schema import Config
from threefold.data.tokens import Tokenizer, difference
from threefold.errors import ConfigError, DataError, Problem, shell_word
from threefold.integrations import trackers
from threefold.mesh.divisibility import batch_problems
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import data_parallel, float8, load, lora
from threefold.model.context_parallel import flex
from threefold.model.context_parallel import limits as cp_limits
from threefold.model.context_parallel.limits import split_problems
from threefold.model.exact import limits as exact_limits
from threefold.model.head import longest_row
from threefold.model.tensor_parallel.plan import expert_problems, plan_problems
from threefold.optim.build import optimizer_problems
from threefold.plan import choices
from threefold.run import eval_tasks
from threefold.run.sources import (
    own_tokenizer,
    refuse_labels_without_effect,
    tokenizer_of,
    with_packing,
)
from threefold.training.loss import router_problems


def tokenizer_problems(config: Config, tokenizer: Tokenizer) -> list[Problem]:
    """Why a tokenizer cannot be used with pretrained weights: to them its ids mean other tokens; empty if it can."""
    model, name = config.model.name_or_path, config.data.tokenizer
    if model is None or name in (None, model) or config.data.allow_other_tokenizer:
        return []
    expected = "the tokenizer that the weights were trained with: others' ids mean other tokens"
    try:
        own = own_tokenizer(config)
    except DataError as error:
        what = f"data.tokenizer = {name!r} cannot be compared with the model's own: {error.problems[0].what}"
        fix = f"{error.problems[0].fix}, and leave data.tokenizer out; if {name} is the model's own: "
        return [Problem(what, expected, fix + "--data.allow_other_tokenizer true")]
    if (differs := difference(tokenizer, own)) is None:
        return []
    what = f"data.tokenizer = {name!r} is not the tokenizer of model.name_or_path = {model!r}: {differs}"
    fix = "leave data.tokenizer out   (or, to train the weights anew: --data.allow_other_tokenizer true)"
    return [Problem(what, expected, fix)]


@dataclass(frozen=True)
class Asked:
    """A request that was checked and can be met.

    Attributes:
        estimated_bytes: what a rank is estimated to hold at its peak; None: not estimated.
        said: choices and estimates of memory with their reasons, to be printed.
    """

    config: Config
    tokenizer: Tokenizer
    architecture: PretrainedConfig
    estimated_bytes: int | None = field(default=None, kw_only=True)
    said: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)


def asked_of(config: Config, mesh: Mesh) -> Asked:
    """Returns what the config asks for; every rank finds the same, before the first collective.

    Raises:
        ConfigError: all that is wrong with the model, the batch and the mesh, at once.
    """
    config = choices.with_dtype(config, data_parallel.device_of(mesh))
    tokenizer, architecture = model_of(config)
    mesh.once_per_host("labels", partial(refuse_labels_without_effect, config))
    config = with_packing(config, mesh)
    check(config, architecture, tokenizer, mesh.topology, device=mesh.device.type)
    return Asked(config, tokenizer, architecture)


def model_of(config: Config) -> tuple[Tokenizer, PretrainedConfig]:
    """Returns the tokenizer and the architecture; a wrong model is reported before its tokenizer."""
    if config.model.name_or_path is not None:
        architecture = load.read_config(config.model)
        return tokenizer_of(config), architecture
    tokenizer = tokenizer_of(config)
    return tokenizer, load.read_config(config.model, vocab_size=tokenizer.vocab_size)


def check(
    config: Config,
    architecture: PretrainedConfig,
    tokenizer: Tokenizer,
    topology: Topology,
    *,
    device: str,
) -> None:
    """Checks everything about the model, the batch and the mesh that is known before the first collective.

    Raises:
        ConfigError: all that is wrong, at once.
    """
    problems = list(setup_problems(config, architecture, topology, device=device))
    problems += (foreign := tokenizer_problems(config, tokenizer))
    vocab_size = getattr(architecture.get_text_config(), "vocab_size", None)
    if not foreign and vocab_size is not None and vocab_size < tokenizer.vocab_size:
        what = f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens, the model only {vocab_size}"
        fix = f"--model.config '{{..., vocab_size: {tokenizer.vocab_size}}}', or the model's own tokenizer"
        if (model := config.model.name_or_path) is not None:
            to = f"{Path(model).name}-{tokenizer.vocab_size}"
            code = (
                f"import transformers as t; m = t.AutoModelForCausalLM.from_pretrained({model!r}); "
                f"m.resize_token_embeddings({tokenizer.vocab_size}); m.save_pretrained({to!r}); "
                f"t.AutoTokenizer.from_pretrained({config.data.tokenizer or model!r}).save_pretrained({to!r})"
            )
            fix = f"python3 -c {shlex.quote(code)} && threefold train --model.name_or_path {shell_word(to)} ..."
        problems.append(
            Problem(what, "an embedding for every token that the tokenizer can produce", fix)
        )
    ConfigError.raise_for(problems)


def setup_problems(
    config: Config, architecture: PretrainedConfig, topology: Topology, *, device: str
) -> Iterator[Problem]:
    """Problems of the model on this mesh, without a tokenizer; empty if there are none."""
    yield from batch_problems(config, topology)
    outline = load.outline(architecture, config.model)
    yield from plan_problems(architecture, topology.tp, plan=outline.tp_plan)
    yield from expert_problems(architecture, config.mesh.ep, topology.tp)
    yield from split_problems(config.mesh.cp_method, topology, outline)
    pretrained = config.model.name_or_path is not None
    yield from cp_limits.direction_problems(outline, pretrained=pretrained)
    if config.data.document_mask:
        yield from cp_limits.document_problems(outline)
    yield from architecture_problems(architecture)
    yield from data_parallel.problems(config, device=device)
    yield from optimizer_problems(config, outline, topology)
    yield from exact_limits.problems(config, architecture, outline, device=device)
    yield from trackers.problems(config.log.trackers)
    yield from eval_tasks.problems(config.eval.tasks)
    if (attention := config.model.attention) in ("flex", "varlen"):
        yield from flex.problems(architecture, attention, device=device)
    if (
        config.train.fused_loss is True
        and not choices.fused_loss("auto", choices.Device.here(device)).value
    ):
        yield Problem(
            f"train.fused_loss = true on a {device}{'' if device == 'cpu' else ', but triton is not installed'}",
            "a CUDA device with triton, for its kernels",
            "--train.fused_loss auto",
        )
    if config.train.float8 != "none":
        yield from float8.problems(config, outline, topology, device=device)
    if config.model.lora.r:
        build = partial(load.outline, architecture, config.model)
        yield from lora.problems(config.model.lora, build, name=architecture.model_type)
    yield from router_problems(outline)
    longest = longest_row(architecture, outline)
    if 0 < longest < config.data.seq_len:
        yield Problem(
            f"data.seq_len = {config.data.seq_len}, but the model supports at most {longest} positions",
            "rows that are no longer than the model's max_position_embeddings",
            f"--data.seq_len {longest}",
        )
