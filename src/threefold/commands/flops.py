"""`threefold flops`: the floating-point operations that a token of training costs, and the formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import Config
    from threefold.plan.operations import Flops

_GIGA = 1e9


def command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hub id, a folder, or a config.json.")],
    gpu: Annotated[str | None, typer.Option(help="Also the tokens/s of this device at its peak: h100-80gb.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON.")] = False,
) -> None:
    """Print what a token of training costs: threefold flops MODEL [--data.seq_len N] [--model.lora.r R].

    The weights are not read. `mfu` in the metrics is this figure, for the keys that each token of a run saw, x tokens/s
    / (ranks x the device's dense bfloat16 peak).
    """
    from threefold.commands.arguments import load_config
    from threefold.plan import accelerators
    from threefold.plan.operations import causal_keys

    device = accelerators.named(gpu) if gpu is not None else None
    _refuse_without_effect(context.args)
    config = load_config([*context.args, *model_keys(model)]).config
    name, total, found = _counted(config)
    keys = causal_keys(config.data.seq_len)
    each = found.per_token(keys)
    if as_json:
        told = {"model_type": name, "parameters": total, "trained": found.trained, "frozen": found.frozen}
        told |= {"seq_len": config.data.seq_len, "attention_flops": found.of_attention(keys), "flops_per_token": each}
        typer.echo(json.dumps(told))
        return
    typer.echo(f"{name}: {total:,} parameters, {config.data.seq_len} tokens a row")
    for line in _lines(found, config.data.seq_len):
        typer.echo(f"  {line}")
    typer.echo(f"  {each / _GIGA:10,.2f} GFLOP a token, forward and backward")
    if device is not None:
        typer.echo(f"  {device.bfloat16 / each:10,.0f} tokens/s of one {gpu} at 100 % of {device.bfloat16:.3g} FLOP/s")


def _refuse_without_effect(arguments: list[str]) -> None:
    from threefold.commands.arguments import split

    path, keys = split(arguments)
    others = [key for key, _ in keys if key != "data.seq_len" and not key.startswith("model.")]
    if path is not None or others:
        what = f"{path or f'--{others[0]}'} has no effect on the operations of a token"
        expected = "a model, its keys (--model.lora.r 16), and the length of a row (--data.seq_len 4096)"
        raise ConfigError(what, expected=expected, fix="leave it out")


def model_keys(model: str) -> list[str]:
    """The keys of the config that name a model: a Hub id, a folder, or a config.json."""
    path = Path(model)
    if path.suffix != ".json":
        return ["--model.name_or_path", model]
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        expected = "a config.json, as in a model's folder"
        raise ConfigError(f"{model} cannot be read: {error}", expected=expected, fix="check the path") from error
    if not isinstance(values, dict) or "model_type" not in values:
        expected = "an object with a model_type, as transformers writes it"
        raise ConfigError(f"{model} has no model_type", expected=expected, fix="check the path")
    return ["--model.config", json.dumps(values)]


def _counted(config: Config) -> tuple[str, int, Flops]:
    """(model type, parameters, what a token meets) of the model that a config names, with its adapters."""
    from threefold.model import load, lora
    from threefold.plan.flops import flops_of

    architecture = load.read_config(config.model)
    outline = load.outline(architecture, trust_remote_code=config.model.trust_remote_code)
    total = sum(parameter.numel() for parameter in outline.parameters())
    if config.model.lora.r:
        refused = lora.problems(config.model.lora, lambda: outline, name=architecture.model_type)
        if refused:
            raise ConfigError.of(refused)
    return architecture.model_type, total, flops_of(outline)


def _lines(found: Flops, seq_len: int) -> list[str]:
    from threefold.plan.operations import causal_keys

    keys = causal_keys(seq_len)
    lines = [
        f"{factor * count / _GIGA:10,.2f} GFLOP = {factor} x {count:,.0f} {what}"
        for factor, count, what in (
            (6, found.trained, "trained parameters of matrices that a token meets: head yes, embedding no"),
            (4, found.frozen, "frozen ones"),
        )
        if count
    ]
    for each, layers in sorted(found.attention.items(), key=str):
        widths = f"({each.query_width} + {each.value_width})"
        seen = keys(each.window)
        window = "" if each.window is None else f" (window {each.window})"
        flops = 6 * layers * each.heads * (each.query_width + each.value_width) * seen
        formula = f"6 x {layers} layers x {each.heads} heads x {widths} x {seen:,.0f} keys{window}"
        lines.append(f"{flops / _GIGA:10,.2f} GFLOP = {formula}")
    return lines
