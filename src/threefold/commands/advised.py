"""The part of `threefold plan` that is asked about some devices: every legal mesh of them, ranked. Loads no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from threefold.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import ModelConfig
    from threefold.plan.advise import Plan, Question

_SHOWN = 10
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Asked:
    """The options of the command, as they were given."""

    model: str
    gpus: int
    gpu: str | None
    nodes: int | None
    tokens: float | None
    price: float | None
    link: str | None
    network: str | None
    emit: Path | None
    html: Path | None
    calibrate: Path | None
    as_json: bool


def advise(asked: Asked, arguments: list[str]) -> tuple[Question, Plan]:
    """Prints the plans of some devices, or writes what is asked for; returns what was asked, and the first.

    Args:
        arguments: keys of the config, which are kept as they are.
    """
    question = _question(asked, arguments)
    plans = question.plans()
    best = plans[0]
    if asked.emit is not None:
        _write(asked.emit, _as_config(question, best, asked.model))
    if asked.html is not None:
        from threefold.plan.page import page

        _write(asked.html, page(question, plans, title=f"{asked.model} on {asked.gpus} x {asked.gpu}"))
    if asked.as_json:
        typer.echo(json.dumps([plan.told() for plan in plans]))
    else:
        _print(question, plans, asked)
    return question, best


def exit_unless_fits(best: Plan) -> None:
    """Ends the command with its exit code."""
    if not best.fits:
        sys.exit(EXIT_FAILED)


def _question(asked: Asked, arguments: list[str]) -> Question:
    from threefold.commands.arguments import load_config
    from threefold.plan import accelerators
    from threefold.plan.adapters import adapted
    from threefold.plan.advise import Question
    from threefold.plan.decoder import decoder_of
    from threefold.plan.fabric import fabric_of

    if asked.gpu is None:
        expected = f"the kind of device: {', '.join(accelerators.ACCELERATORS)}"
        raise ConfigError("--gpus without --gpu", expected=expected, fix="--gpu h100-80gb")
    device = accelerators.named(asked.gpu)
    nodes = asked.nodes or -(-asked.gpus // 8)
    if asked.gpus % nodes:
        expected = "as many devices on each host"
        fix = f"--nodes {max(size for size in range(1, nodes + 1) if asked.gpus % size == 0)}"
        raise ConfigError(f"--gpus {asked.gpus} cannot be divided over --nodes {nodes}", expected=expected, fix=fix)
    loaded = load_config(arguments)
    values = values_of(asked.model, loaded.config.model)
    fabric = fabric_of(device, in_host=asked.gpus // nodes, link=asked.link, network=asked.network)
    slower = 1.0
    if asked.calibrate is not None:
        from threefold.plan.calibrate import slower_than_estimated

        slower = slower_than_estimated(asked.calibrate, values, device, fabric)
    pinned = frozenset(loaded.origins)
    config = loaded.config
    if "model.dtype" not in pinned:
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    return Question(adapted(decoder_of(values), config.model.lora), config, pinned, asked.gpus, fabric, device, slower)


def values_of(model: str, asked: ModelConfig) -> dict[str, Any]:
    """The object of a model's config.json: a file, a folder's, or one that the Hub or its cache has.

    Raises:
        ConfigError: there is none.
    """
    if asked.config is not None:
        return asked.config
    path = Path(model) / "config.json"
    if not path.is_file():
        path = _from_hub(model, asked.revision)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        expected = "a folder with a config.json, as transformers writes it"
        raise ConfigError(f"{path} cannot be read: {error}", expected=expected, fix="check the path") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no object", expected="a model's config.json", fix="check the path")
    return values


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except Exception as error:  # of several families: no such model, no network, a name that is none
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        expected = "a Hub id, a folder with a config.json, or a config.json"
        raise ConfigError(
            f"{model} has no config.json that can be read: {reason}", expected=expected, fix="check it"
        ) from error


def _as_config(question: Question, plan: Plan, model: str) -> str:
    """YAML that `threefold train` takes."""
    from threefold.config.text import as_yaml

    config, told = question.config, plan.keys()
    named: dict[str, Any] = {"config": config.model.config} if config.model.config else {"name_or_path": model}
    sections: dict[str, dict[str, Any]] = {
        "model": {**named, "dtype": config.model.dtype},
        "data": {"seq_len": config.data.seq_len},
        "mesh": told["mesh"],
        "train": {"global_batch": config.train.global_batch, **told["train"]},
    }
    for key in sorted(question.pinned):
        section, _, name = key.partition(".")
        if "." not in name and name not in sections.setdefault(section, {}) and key != "model.name_or_path":
            sections[section][name] = getattr(getattr(config, section), name)
    lines = [f"# {plan.why}; {plan.duration.total:.2f} s a step, estimated by threefold plan"]
    for section, keys in sections.items():
        lines += [f"{section}:", *(f"  {key}: {as_yaml(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        expected = "a file that can be written"
        raise ConfigError(f"{path}: {error.strerror}", expected=expected, fix="check the path") from error


def number_of(text: str) -> float:
    """20B -> 20e9; ConfigError if it is no number of tokens."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        found = float(digits) * _UNITS[unit]
    except (KeyError, ValueError):
        found = 0.0
    if not 0 < found < float("inf"):
        expected = "a number above 0 with K, M, B or T"
        raise ConfigError(f"--tokens {text} is not a number of tokens", expected=expected, fix="--tokens 20B")
    return found


def _print(question: Question, plans: list[Plan], asked: Asked) -> None:
    from threefold.plan.advise import pareto, what_fits, what_pays

    fitting = [plan for plan in plans if plan.fits]
    decoder, config = question.decoder, question.config
    typer.echo(
        f"{decoder.model_type}: {decoder.size:,} parameters on {asked.gpus} x {asked.gpu}, {question.fabric.in_host} "
        f"in a host; {config.train.global_batch} rows of {config.data.seq_len} tokens a step, {config.model.dtype}"
    )
    typer.echo(f"{len(plans):,} set-ups are legal, {len(fitting):,} fit; estimated, see docs/plan.md for how far")
    _table(fitting[:_SHOWN], set(map(id, pareto(plans))), asked)
    if fitting:
        best = fitting[0]
        typer.echo("\nthe first, at the moment when a rank holds the most: " + best.peak.name)
        for line, size in sorted(best.peak.lines.items(), key=lambda item: -item[1]):
            typer.echo(f"  {size / 2**30:8.2f} GiB  {line}")
        typer.echo("\nwhat it sends, s a step: " + (", ".join(
            f"{axis} {seconds:.2f}" for axis, seconds in best.duration.sent.items()) or "nothing")
            + f"; waited for: {best.duration.waited:.2f}")  # fmt: skip
        for line in what_pays(question, plans):
            typer.echo(f"  {line}")
    if rejected := [plan for plan in plans if not plan.fits]:
        typer.echo("\nof those that do not fit, the nearest:")
        for plan in rejected[:3]:
            fix = what_fits(plan, plans)
            typer.echo(f"  {_shown(plan)}: {plan.why}" + (f"\n    fits with {fix}" if fix else ""))


def _table(plans: list[Plan], best: set[int], asked: Asked) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    heads = ["", "mesh", "rows", "checkpointing", "GiB", "s a step", "tokens/s a GPU", "MFU"]
    tokens = asked.tokens
    heads += ["days"] * (tokens is not None) + ["cost"] * (tokens is not None and asked.price is not None)
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "mesh", "checkpointing") else "right")
    for plan in plans:
        setup = plan.setup
        cells = [
            "*" if id(plan) in best else "", str(setup.topology), str(setup.micro_batch),
            setup.recompute + (" + cpu_offload" if setup.cpu_offload else ""), f"{plan.memory_bytes / 2**30:.1f}",
            f"{plan.duration.total:.2f}", f"{plan.tokens_per_s_per_gpu:,.0f}", f"{plan.mfu:.1%}",
        ]  # fmt: skip
        if tokens is not None:
            days = tokens / (plan.tokens_per_s_per_gpu * asked.gpus) / 86400
            cells.append(f"{days:.2f}")
            if asked.price is not None:
                cells.append(f"{days * 24 * asked.gpus * asked.price:,.0f}")
        table.add_row(*cells)
    console = Console(width=140, soft_wrap=True, highlight=False, markup=False)
    if plans:
        console.print(table)
        typer.echo("  *: none is both faster and smaller; rows: of a micro-batch; cost: in the unit of --price")


def _shown(plan: Plan) -> str:
    setup = plan.setup
    return f"{setup.topology}, {setup.micro_batch} rows, {setup.recompute}" + ", cpu_offload" * setup.cpu_offload
