"""From a config and a live mesh to a run that can start: model, data, optimizer, checkpoints, trackers."""

from __future__ import annotations

import copy
import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from transformers import PretrainedConfig

from threefold import __version__
from threefold.config.schema import Config, DataConfig, MixtureSource
from threefold.data.loader import Batch, TokenLoader, evaluation_batches
from threefold.data.mixture import Mixture
from threefold.data.order import Order
from threefold.data.rows.concat import Rows
from threefold.data.rows.mixed import MixedRows
from threefold.data.rows.packing import Packing, open_rows
from threefold.data.text.source import Source
from threefold.data.tokens import Tokenizer, load_tokenizer
from threefold.errors import ConfigError, Problem, ThreefoldError
from threefold.integrations import trackers
from threefold.jsonl import Tracker
from threefold.mesh.environment import cache_folder, data_path
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import data_parallel, fused_loss, load, lora
from threefold.model.context_parallel import flex
from threefold.model.context_parallel import split as context_parallel
from threefold.model.tensor_parallel import plan as tensor_parallel

DEFAULT_STEPS = 120
_FORMAT = 1


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
    problems += tensor_parallel.problems(architecture, topology.tp, plan=plan)
    problems += tensor_parallel.expert_problems(architecture, config.mesh.ep, topology.tp)
    problems += context_parallel.problems(config.mesh.cp_method, architecture, topology)
    problems += data_parallel.problems(config.mesh, topology, device=device)
    problems += trackers.problems(config.log.trackers)
    problems += flex.problems(config.model.attention, architecture, device=device)
    problems += fused_loss.problems(
        config.train.fused_loss, device=device, tp=topology.tp, label_smoothing=config.train.label_smoothing
    )
    problems += lora.problems(
        config.model.lora,
        lambda: load.build_without_storage(
            copy.deepcopy(architecture), attention="eager", trust_remote_code=config.model.trust_remote_code
        ),
        name=architecture.model_type,
    )
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


def trackers_of(
    config: Config, mesh: Mesh, folder: Path, num_parameters: int, *, first_step: int, say: Callable[[str], None]
) -> list[Tracker]:
    """Who hears the run's metrics beside the metrics file; rank 0 calls it.

    Args:
        say: prints a line for people, where a tracker fails.
    """
    facts = {
        "mesh": str(mesh.topology),
        "ranks": mesh.world_size,
        "device": mesh.device.type,
        "parameters": num_parameters,
        "threefold": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }
    run = trackers.RunDescription(folder, config.log.project, config.model_dump(mode="json"), facts, first_step)
    return trackers.open_trackers(config.log.trackers, run, say)


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


def rows_of(config: Config, tokenizer: Tokenizer, mesh: Mesh, *, held_out: bool = False) -> Rows:
    """The rows of data.source or data.mixture, or of eval.source; text is prepared by one rank of each machine."""
    data = config.data
    if held_out:
        assert config.eval.source is not None
        own = MixtureSource(source=config.eval.source, weight=1, split=config.eval.split)
        return _open_on(mesh, "evaluation data", lambda: _rows_of_evaluation(data, own, tokenizer))
    if data.mixture is None:
        own = MixtureSource(source=data.source, weight=1)
        return _open_on(mesh, "data", lambda: _rows_of_source(data, own, tokenizer))
    mixture = data.mixture
    return _open_on(
        mesh,
        "data",
        lambda: MixedRows({name: _rows_of_named(data, name, mixture[name], tokenizer) for name in mixture}),
    )


def _open_on(mesh: Mesh, what: str, open_here: Callable[[], Rows]) -> Rows:
    mesh.once_per_host(what, lambda: open_here().fingerprint)
    return open_here()


def _rows_of_named(data: DataConfig, name: str, source: MixtureSource, tokenizer: Tokenizer) -> Rows:
    try:
        return _rows_of_source(data, source, tokenizer)
    except ThreefoldError as error:
        # Whoever reads one source speaks of data.source.
        named = [Problem(f"data.mixture.{name}: {each.what}", each.expected, each.fix) for each in error.problems]
        raise type(error).of(named) from error


def _rows_of_evaluation(data: DataConfig, source: MixtureSource, tokenizer: Tokenizer) -> Rows:
    try:
        return _rows_of_source(data, source, tokenizer)
    except ThreefoldError as error:
        # Whoever reads a source speaks of data.source.
        named = [
            Problem(*(text.replace("data.source", "eval.source") for text in (each.what, each.expected, each.fix)))
            for each in error.problems
        ]
        raise type(error).of(named) from error


def _rows_of_source(data: DataConfig, source: MixtureSource, tokenizer: Tokenizer) -> Rows:
    """The rows of one source; what it does not say for itself is as in the data section."""
    named = Source(
        data_path(source.source),
        text_field=source.text_field or data.text_field,
        split=source.split or data.split,
        config_name=source.config_name or data.config_name,
        revision=source.revision or data.revision,
        skip_bad_lines=data.skip_bad_lines,
    )
    packing = Packing(data.seq_len, data.packing, data.document_mask, data.truncate, data.lookahead)
    return open_rows(named, packing, tokenizer=tokenizer, cache=cache_folder())


def data_name(config: Config) -> str:
    """The source, or the mixture's sources with their weights, as a person would say it."""
    if config.data.mixture is None:
        return config.data.source
    return " + ".join(f"{source.weight:g} {name}" for name, source in config.data.mixture.items())


def mixture_of(config: Config, rows: Rows) -> Mixture | None:
    """The order over the sources of data.mixture, or None where there is one source."""
    if config.data.mixture is None:
        return None
    assert isinstance(rows, MixedRows)
    weights = {name: source.weight for name, source in config.data.mixture.items()}
    return Mixture(rows.sizes, weights, seed=config.data.seed)


def loader_of(config: Config, rows: Rows, mesh: Mesh) -> TokenLoader:
    """The training batches of this rank."""
    order = Order(
        num_rows=rows.num_rows,
        global_batch=config.train.global_batch,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        mixture=mixture_of(config, rows),
    )
    return TokenLoader(
        rows,
        order,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        document_mask=config.data.document_mask,
        num_workers=config.data.num_workers,
        pin_memory=mesh.device.type == "cuda",
    )


@dataclass(frozen=True)
class HeldOut:
    """Makes the evaluation batches of this rank anew at each call."""

    rows: Rows
    rows_per_rank: int
    mesh: Mesh
    document_mask: bool

    def __call__(self) -> Iterable[Batch]:
        return evaluation_batches(
            self.rows,
            rows_per_rank=self.rows_per_rank,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
            document_mask=self.document_mask,
        )
