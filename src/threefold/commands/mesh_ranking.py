"""The part of `threefold plan` that ranks every legal mesh of some devices. Loads no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from threefold.commands.model_config import planned_config, values_of
from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import Config
    from threefold.plan.accelerators import Accelerator
    from threefold.plan.advise import Plan, Question

_SHOWN = 10
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Devices:
    """The hardware to plan for: devices, their links, the hourly price of one, and whether one is measured."""

    count: int
    name: str | None
    nodes: int | None
    link: str | None
    network: str | None
    price: float | None
    measure: bool = False


def ranked(
    devices: Devices,
    arguments: list[str],
    *,
    tokens: float | None,
    emit: Path | None,
    as_json: bool,
) -> Plan:
    """Prints the plans for some devices, or writes the requested file; returns the first plan.

    Args:
        arguments: config keys to keep as they are.
        tokens: of the run whose duration in days is asked for.
        emit: a file for the first plan, as a config.
    """
    question = _question(devices, arguments)
    plans = question.plans()
    if emit is not None:
        _write(emit, _as_config(question, plans[0]))
    if as_json:
        typer.echo(json.dumps([plan.to_json() for plan in plans]))
    else:
        _print(question, plans, devices, tokens)
    return plans[0]


def _question(devices: Devices, arguments: list[str]) -> Question:
    from threefold.plan import accelerators
    from threefold.plan.adapters import adapted
    from threefold.plan.advise import Question
    from threefold.plan.decoder import decoder_of
    from threefold.plan.fabric import fabric_of

    if devices.name is None:
        raise ConfigError(
            "--gpus without --gpu",
            expected=f"the kind of device: {', '.join(accelerators.ACCELERATORS)}",
            fix="--gpu h100-80gb",
        )
    device = accelerators.by_name(devices.name)
    count = devices.count
    nodes = devices.nodes or -(-count // 8)
    if count % nodes:
        raise ConfigError(
            f"--gpus {count} cannot be divided over --nodes {nodes}",
            expected="as many devices on each host",
            fix=f"--nodes {max(size for size in range(1, nodes + 1) if count % size == 0)}",
        )
    config, pinned = planned_config(arguments)
    values = values_of(config.model)
    decoder = adapted(decoder_of(values), config.model.lora)
    fabric = fabric_of(
        device, in_host=count // nodes, link=devices.link, network=devices.network
    )
    slow = _measured(config, values, device, devices.name) if devices.measure else None
    return Question(decoder, config, pinned, count, fabric, device, slow)


def _measured(config: Config, values: dict[str, Any], device: Accelerator, name: str) -> float:
    """How many times as long as by published speeds layers take on this machine's device; loads torch."""
    from threefold.run.layer_times import require_here, slowness

    require_here(device, name)
    return slowness(config, values, device)


def _as_config(question: Question, plan: Plan) -> str:
    """YAML that `threefold train` takes: the keys that were given, and those of the plan."""
    from threefold.config.yaml_text import as_document

    values = question.config.model_dump(mode="json")
    document = dict[str, Any]()
    for key in sorted({*question.pinned, "model.dtype", "data.seq_len", "train.global_batch"}):
        *sections, name = key.split(".")
        source, target = values, document
        for section in sections:
            source = source[section]
            target = target.setdefault(section, {})
        target[name] = source[name]
    for section, keys in plan.sections().items():
        document.setdefault(section, {}).update(keys)
    seconds = _range(plan, plan.duration.total, ".2f")
    return f"# {plan.why}; {seconds} s a step, estimated by threefold plan\n{as_document(document)}"


def _range(plan: Plan, figure: float, form: str) -> str:
    """The range of a figure by the estimate: 2.21-2.72."""
    low, high = plan.between(figure)
    return f"{low:{form}}-{high:{form}}"


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}",
            expected="a new file, in a folder that this user can write",
            fix="--emit ANOTHER_FILE",
        ) from error


def number_of(text: str) -> float:
    """20B -> 20e9; ConfigError if it is no number of tokens."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        number = float(digits) * _UNITS[unit]
    except (KeyError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(
            f"--tokens {text} is not a number of tokens",
            expected="a number above 0 with K, M, B or T",
            fix="--tokens 20B",
        )
    return number


def _print(
    question: Question, plans: list[Plan], devices: Devices, tokens: float | None
) -> None:
    from threefold.plan.advise import pareto, what_fits, what_pays
    from threefold.plan.operations import formula

    fitting = [plan for plan in plans if plan.fits]
    decoder, config = question.decoder, question.config
    in_host, rows = question.fabric.in_host, config.train.global_batch
    typer.echo(
        f"{decoder.model_type}: {decoder.size:,} parameters on {devices.count} x {devices.name}, {in_host} in a host; "
        f"{rows} rows of {config.data.seq_len} tokens a step, {config.model.dtype}"
    )
    typer.echo(
        f"{len(plans):,} set-ups are legal, {len(fitting):,} fit; estimated, see docs/plan.md for accuracy"
    )
    for line in formula(decoder.flops, config.data.seq_len):
        typer.echo(line)
    if question.slowness is not None:
        typer.echo(
            f"measured here: layers take {question.slowness:.2f} of the time that published speeds predict"
        )
    _table(fitting[:_SHOWN], set(map(id, pareto(plans))), devices, tokens)
    if fitting:
        best = fitting[0]
        typer.echo("\nthe first, when a rank holds the most: " + best.peak.name)
        for line, size in sorted(best.peak.lines.items(), key=lambda item: -item[1]):
            typer.echo(f"  {size / 2**30:8.2f} GiB  {line}")
        typer.echo("\nwhat it sends, s a step: " + (", ".join(
            f"{axis} {seconds:.2f}" for axis, seconds in best.duration.sent.items()) or "nothing")
            + f"; waited for: {best.duration.waited:.2f}")  # fmt: skip
        for line in what_pays(question, plans):
            typer.echo(f"  {line}")
        if "://" in str(config.data.source):
            typer.echo(_of_store(rows, rows // best.setup.topology.dp, best.duration.total))
    if rejected := [plan for plan in plans if not plan.fits]:
        typer.echo("\nthe closest of those that do not fit:")
        for plan in rejected[:3]:
            fix = what_fits(plan, plans)
            typer.echo(
                f"  {_shown(plan)}: {plan.why}" + (f"\n    fits with {fix}" if fix else "")
            )


def _of_store(rows: int, rows_of_rank: int, seconds: float) -> str:
    """The reads of a step from a store with an empty cache: a block for each row."""
    from threefold.data.store.blocks import BLOCK_BYTES

    mib = rows * BLOCK_BYTES / 2**20
    rate = rows_of_rank * BLOCK_BYTES / 2**20 / seconds
    read = f"it reads {mib:,.0f} MiB a step of the store, with an empty cache"
    return f"{read}; a dp rank waits where its part is below {rate:,.1f} MiB/s"


def _table(plans: list[Plan], best: set[int], devices: Devices, tokens: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    heads = ["", "mesh", "rows", "checkpointing", "GiB", "s a step", "tokens/s a GPU", "MFU"]
    heads += ["days"] * (tokens is not None) + ["cost"] * (
        tokens is not None and devices.price is not None
    )
    for head in heads:
        table.add_column(
            head, justify="left" if head in ("", "mesh", "checkpointing") else "right"
        )
    for plan in plans:
        setup = plan.setup
        cells = [
            "*" * (id(plan) in best) + "=" * (not plan.slower_than(plans[0])),
            str(setup.topology), str(setup.micro_batch),
            setup.recompute + (" + cpu_offload" if setup.cpu_offload else ""), f"{plan.memory_bytes / 2**30:.1f}",
            _range(plan, plan.duration.total, ".2f"), _range(plan, plan.tokens_per_s_per_gpu, ",.0f"),
            _range(plan, plan.mfu, ".0%"),
        ]  # fmt: skip
        if tokens is not None:
            days = tokens / (plan.tokens_per_s_per_gpu * devices.count) / 86400
            cells.append(_range(plan, days, ".2f"))
            if devices.price is not None:
                cells.append(_range(plan, days * 24 * devices.count * devices.price, ",.0f"))
        table.add_row(*cells)
    console = Console(width=140, soft_wrap=True, highlight=False, markup=False)
    if plans:
        console.print(table)
        margin = plans[0].margin
        typer.echo(
            "  *: none is both faster and smaller; rows: of a micro-batch; cost: in the unit of --price"
        )
        typer.echo(
            f"  low-high: what {margin.source}: a factor of {margin.figure:.2f} on either side; "
            f"=: as fast as the first, or less than {margin.difference:.0%} apart, which the estimate cannot tell"
        )


def _shown(plan: Plan) -> str:
    setup = plan.setup
    return (
        f"{setup.topology}, {setup.micro_batch} rows, {setup.recompute}"
        + ", cpu_offload" * setup.cpu_offload
    )
