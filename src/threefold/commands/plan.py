"""`threefold plan`: what a rank of a mesh holds and sends in a step, before there is any."""

from __future__ import annotations

import json
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from threefold.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import Config
    from threefold.mesh.topology import Topology
    from threefold.plan.accelerators import Accelerator
    from threefold.plan.operations import Flops
    from threefold.run.plan_trace import Traced


def command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A Hub id, a folder, a config.json, a run, or its YAML."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**20,
            help="Estimate and rank every legal mesh of this many devices; needs --gpu.",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The device, to see whether it fits there: h100-80gb.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Hosts; default: one per 8 devices.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Also the days it takes for this many tokens: 20B.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Also the cost, at this price per device-hour: 2.5."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Inside a host: nvlink4, nvlink5, pcie4, pcie5, or as measured: 9GB/s."
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Between hosts: ib-ndr, ib-hdr, efa, efa-p4d, roce, 100gbe, 25gbe, or measured."
        ),
    ] = None,
    emit: Annotated[
        Path | None,
        typer.Option(help="Write the first-ranked as a config for `threefold train`."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Base times on layers measured here, on a --gpu.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a list with --gpus, else one object.")
    ] = False,
) -> None:
    """Estimate a mesh before you have one: threefold plan MODEL --gpus 64 --gpu h100-80gb --data.seq_len 8192.

    With --gpus it estimates every legal mesh, micro-batch and checkpointing, without torch, and ranks them by time;
    keys (--mesh.tp 2) are kept as given. Without it, it traces one set-up (--mesh.dp 8 --train.micro_batch 1): the
    model's own code, split for any number of ranks on this CPU. The weights are not read.
    """
    from threefold.commands.model_config import model_keys

    _refuse_without_effect(context.args)
    keys = [*(model_keys(model) if model else ()), *context.args]
    if not any(key.startswith("--model.") for key in keys) and not model:
        raise ConfigError(
            "no model is named",
            expected="a Hub id, a folder, a config.json, a run, or its YAML",
            fix=f"threefold plan Qwen/Qwen3-8B {shlex.join(sys.argv[2:])}",
        )
    only = {
        "--nodes": nodes, "--tokens": tokens, "--price": price, "--link": link, "--network": network, "--emit": emit,
        "--measure": measure or None,
    }  # fmt: skip
    if gpus is None:
        _refuse(
            [name for name, value in only.items() if value is not None],
            "without --gpus",
            "--gpus 8 --gpu h100-80gb",
        )
        _one(keys, gpu, as_json=as_json)
        return
    _refuse(
        ["--price"] * (price is not None and tokens is None), "without --tokens", "--tokens 20B"
    )
    from threefold.commands.mesh_ranking import Devices, number_of, ranked

    num_tokens = number_of(tokens) if tokens is not None else None
    devices = Devices(gpus, gpu, nodes, link, network, price, measure)
    best = ranked(devices, keys, tokens=num_tokens, emit=emit, as_json=as_json)
    if not best.fits:
        sys.exit(EXIT_FAILED)


def _refuse(names: list[str], where: str, fix: str) -> None:
    if names:
        raise ConfigError(
            f"{names[0]} has no effect {where}",
            expected="options that change the output",
            fix=fix,
        )


def _one(keys: list[str], gpu: str | None, *, as_json: bool) -> None:
    """Prints what one set-up needs, traced."""
    from threefold.commands.model_config import planned_config
    from threefold.mesh.topology import resolve
    from threefold.plan import accelerators
    from threefold.plan.operations import causal_keys, formula

    device = accelerators.by_name(gpu) if gpu is not None else None
    config, _ = planned_config(keys)
    axes = (config.mesh.dp or config.mesh.dp_shard, config.mesh.cp, config.mesh.tp)
    if "auto" in axes:
        raise ConfigError(
            "an axis of the mesh is auto",
            expected="the size of each axis: there are no ranks to fill it",
            fix="--mesh.dp 8",
        )
    world_size = math.prod(int(size or 1) for size in axes)
    topology, _ = resolve(config.mesh, launched_world_size=world_size)
    name, parameters, operations, traced = _traced(config, topology)
    flops = operations.per_token(causal_keys(config.data.seq_len))
    facts = {
        **asdict(traced),
        "ranks": world_size,
        "mesh": str(topology),
        "parameters": parameters,
    }
    if as_json:
        sent = [{"axis": axis, "collective": kind, "calls": calls, "bytes": size}
                for (axis, kind), (calls, size) in traced.sent.items()]  # fmt: skip
        fits = {"fits": traced.peak_bytes <= device.memory_bytes} if device is not None else {}
        typer.echo(json.dumps({**facts, "sent": sent, "flops_per_token": flops, **fits}))
    else:
        typer.echo(f"{name}: {parameters:,} parameters on {topology}, {world_size} ranks")
        for line in [
            *_lines(config, traced),
            *formula(operations, config.data.seq_len),
            *_compute(config, topology, flops, device, gpu or "", traced),
        ]:
            typer.echo(line)
    if device is not None and traced.peak_bytes > device.memory_bytes:
        sys.exit(EXIT_FAILED)


def _refuse_without_effect(arguments: list[str]) -> None:
    """Refuses keys of sections that change nothing here; a file may have them, as it is the run's."""
    from threefold.commands.arguments import split

    _, keys = split(arguments)
    for key in (
        key
        for key, _ in keys
        if key.partition(".")[0] in ("eval", "log", "checkpoint", "audit", "dpo")
    ):
        raise ConfigError(
            f"--{key} has no effect on a step",
            expected="keys of model, data, mesh, train and optimizer",
            fix="leave it out",
        )


def _traced(config: Config, topology: Topology) -> tuple[str, int, Flops, Traced]:
    import torch
    import transformers

    from threefold.model import load, lora
    from threefold.model.flops import flops_of
    from threefold.run.plan_trace import refused, trace
    from threefold.run.request import setup_problems

    torch.set_num_threads(1)  # nothing is computed
    transformers.utils.logging.set_verbosity_error()
    architecture = load.read_config(config.model)
    # First what cannot be traced: some of it asks the device, and there need not be one.
    ConfigError.raise_for(refused(config))
    ConfigError.raise_for(setup_problems(config, architecture, topology, device="cuda"))
    outline: Any = load.outline(architecture, config.model)
    if config.model.lora.r:
        lora.insert(outline, config.model.lora)
    parameters = sum(parameter.numel() for parameter in outline.parameters())
    traced = trace(config, architecture, topology)
    return architecture.model_type, parameters, flops_of(outline), traced


def _lines(config: Config, traced: Traced) -> list[str]:
    rest = traced.peak_bytes - traced.parameters_bytes - traced.optimizer_bytes
    lines = [
        f"  {config.train.global_batch} rows of {config.data.seq_len} tokens a step, {config.model.dtype}, "
        f"checkpointing {config.train.activation_checkpointing}",
        f"a rank holds at its peak       {_gib(traced.peak_bytes)}",
        f"  its part of the weights      {_gib(traced.parameters_bytes)}",
        f"  its part of the moments      {_gib(traced.optimizer_bytes)}",
        f"  what lives in the step       {_gib(rest)}   activations, gathered weights, gradients "
        f"({traced.gradients_bytes / 2**30:.2f} GiB when complete)",
        f"as a process on a CPU          {_gib(traced.resident_bytes)}   {traced.host_bytes / 2**30:.2f} GiB of it the "
        "interpreter and libraries; with what gloo copies and glibc keeps",
    ]
    if traced.sent:
        lines.append("a rank sends in a step, in whole tensors of an axis")
        lines += [
            f"  {axis:12} {kind:15} {calls:6} calls {_gib(size)}"
            for (axis, kind), (calls, size) in traced.sent.items()
        ]
    return lines


def _gib(size: int) -> str:
    return f"{size / 2**30:9.2f} GiB"


def _compute(
    config: Config,
    topology: Topology,
    flops: float,
    device: Accelerator | None,
    gpu: str,
    traced: Traced,
) -> list[str]:
    tokens = config.train.global_batch * config.data.seq_len
    of_rank = flops * tokens / topology.world_size
    lines = [
        f"a rank computes in a step      {of_rank / 1e12:9.2f} TFLOP, without recomputation"
    ]
    if device is None:
        return lines
    whole = device.memory_bytes / 2**30
    peak = traced.peak_bytes / 2**30
    lines.append(f"  at least {of_rank / device.bfloat16:.3f} s, at the peak of {gpu}")
    if peak > whole:
        return [
            *lines,
            f"it does not fit on {gpu}: {peak:.2f} GiB, and the device has {whole:.0f}",
        ]
    left = f"{whole - peak:.2f} are left for the driver, buffers of collectives and what the allocator rounds up"
    return [*lines, f"it fits on {gpu}: of {whole:.0f} GiB, {left}"]
