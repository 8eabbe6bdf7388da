"""`threefold plan`: what a rank of a mesh holds and sends in a step, before there is any."""

from __future__ import annotations

import json
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
    from threefold.plan.advise import Plan, Question
    from threefold.run.traced import Traced


def command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hub id, a folder, or a config.json.")],
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Every legal mesh of so many devices, estimated and ranked; needs --gpu.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="The device, and whether it fits there: h100-80gb.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Hosts; default: one for every 8 devices.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1, help="As --data.seq_len.")] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", min=1, help="As --train.global_batch.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Also the days of a run of so many tokens: 20B.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Also its cost, of a device's hour: 2.5.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Inside of a host: nvlink4, nvlink5, pcie4, pcie5, or as measured: 9GB/s.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Between hosts: ib-ndr, ib-hdr, efa, efa-p4d, roce, 100gbe, 25gbe, or measured.")
    ] = None,
    emit: Annotated[Path | None, typer.Option(help="Write the first as a config that `threefold train` takes.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with bars and the step's timeline.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="The folder of a run of this model on this device, whose speed counts.")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Also trace the first, and say where they differ.")] = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of the mesh; default: what its axes give.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON: a list with --gpus, else one object.")] = False,
) -> None:
    """What a mesh needs before there is one: threefold plan MODEL --gpus 64 --gpu h100-80gb --seq-len 8192.

    With --gpus every legal mesh, micro-batch and checkpointing is estimated, without torch, and ranked by time; keys
    (--mesh.tp 2) are kept as given. Without it one set-up (--mesh.dp 8 --train.micro_batch 1) is traced: the model's
    own code, split for any number of ranks on this CPU. The weights are not read.
    """
    from threefold.commands.flops import model_keys

    options = {"--data.seq_len": seq_len, "--train.global_batch": global_batch}
    given = [text for key, value in options.items() if value is not None for text in (key, str(value))]
    _refuse_without_effect(context.args)
    keys = [*model_keys(model), *given, *context.args]
    only = {
        "--nodes": nodes, "--tokens": tokens, "--price": price, "--link": link, "--network": network, "--emit": emit,
        "--html": html, "--calibrate": calibrate, "--trace": trace or None,
    }  # fmt: skip
    if gpus is None:
        _refuse(
            [name for name, value in only.items() if value is not None], "without --gpus", "--gpus 8 --gpu h100-80gb"
        )
        _one(keys, ranks, gpu, as_json=as_json)
        return
    _refuse(["--ranks"] * (ranks is not None), "with --gpus", "leave it out")
    _refuse(["--price"] * (price is not None and tokens is None), "without --tokens", "--tokens 20B")
    _refuse(["--trace"] * (trace and as_json), "with --json", "leave one of them out")
    from threefold.commands.advised import Asked, advise, exit_unless_fits, number_of

    wanted = number_of(tokens) if tokens is not None else None
    asked = Asked(model, gpus, gpu, nodes, wanted, price, link, network, emit, html, calibrate, as_json)
    question, best = advise(asked, keys)
    if trace:
        _beside(question, best)
    exit_unless_fits(best)


def _refuse(names: list[str], where: str, fix: str) -> None:
    if names:
        raise ConfigError(f"{names[0]} has no effect {where}", expected="options that change what is told", fix=fix)


def _beside(question: Question, best: Plan) -> None:
    """Traces a plan, and prints what differs by more than 5 %."""
    from dataclasses import replace

    from threefold.plan.peak import peak
    from threefold.plan.setup import setup_of
    from threefold.plan.traffic import traffic

    keys = {**best.keys()["train"], "compile": False}
    mesh, topology = best.keys()["mesh"], best.setup.topology
    config = question.config.model_copy(
        update={
            "mesh": question.config.mesh.model_copy(update=mesh),
            "train": question.config.train.model_copy(update=keys),
        }
    )
    found = _traced(config, topology)[3]
    # On a CPU, uncompiled, as it is traced.
    setup = setup_of(config, question.decoder, topology, None)
    estimated = {"bytes alive at the peak": (peak(question.decoder, setup).total, found.peak_bytes)}
    sent = traffic(question.decoder, replace(setup))
    for key in sorted({*sent, *found.sent}):
        estimated[f"bytes of {key[1]} over {key[0]}"] = sent.get(key, (0, 0))[1], found.sent.get(key, (0, 0))[1]
    typer.echo("\ntraced as on a CPU, layers not compiled, beside the estimate for the same:")
    for what, (one, other) in estimated.items():
        differs = abs(one - other) > 0.05 * max(one, other)
        typer.echo(f"  {what}: {one / 2**30:.3f} and {other / 2**30:.3f} GiB" + "   DIFFERS by more than 5 %" * differs)


def _one(keys: list[str], ranks: int | None, gpu: str | None, *, as_json: bool) -> None:
    """Prints what one set-up needs, traced."""
    from threefold.commands.arguments import load_config
    from threefold.mesh.topology import resolve
    from threefold.plan import accelerators

    device = accelerators.named(gpu) if gpu is not None else None
    config = load_config(keys).config
    axes = (config.mesh.dp, config.mesh.cp, config.mesh.tp)
    if ranks is None and "auto" in axes:
        expected = "the number of ranks, of which mesh: auto takes what the other axes leave"
        raise ConfigError("an axis of the mesh is auto, but --ranks is not given", expected=expected, fix="--ranks 64")
    dp, cp, tp = (axis or 1 for axis in (config.mesh.dp or config.mesh.dp_shard, *axes[1:]))
    world_size = ranks if ranks is not None else int(dp) * int(cp) * int(tp)
    topology, _ = resolve(config.mesh, launched_world_size=world_size, num_devices=None)
    name, parameters, flops, found = _traced(config, topology)
    told = {**asdict(found), "ranks": world_size, "mesh": str(topology), "parameters": parameters}
    if as_json:
        sent = [{"axis": axis, "collective": kind, "calls": calls, "bytes": size}
                for (axis, kind), (calls, size) in found.sent.items()]  # fmt: skip
        fits = {"fits": found.peak_bytes <= device.memory_bytes} if device is not None else {}
        typer.echo(json.dumps({**told, "sent": sent, "flops_per_token": flops, **fits}))
    else:
        typer.echo(f"{name}: {parameters:,} parameters on {topology}, {world_size} ranks")
        for line in [*_lines(config, found), *_compute(config, topology, flops, device, gpu or "", found)]:
            typer.echo(line)
    if device is not None and found.peak_bytes > device.memory_bytes:
        sys.exit(EXIT_FAILED)


def _refuse_without_effect(arguments: list[str]) -> None:
    """Refuses keys of sections that change nothing here; a file may have them, as it is the run's."""
    from threefold.commands.arguments import split

    _, keys = split(arguments)
    for key in (key for key, _ in keys if key.partition(".")[0] in ("eval", "log", "checkpoint", "audit", "dpo")):
        expected = "keys of model, data, mesh, train and optimizer"
        raise ConfigError(f"--{key} has no effect on a step", expected=expected, fix="leave it out")


def _traced(config: Config, topology: Topology) -> tuple[str, int, float, Traced]:
    import torch
    import transformers

    from threefold.model import load
    from threefold.plan.flops import flops_of
    from threefold.plan.operations import causal_keys
    from threefold.run.request import setup_problems
    from threefold.run.traced import refused, trace

    torch.set_num_threads(1)  # nothing is computed
    transformers.utils.logging.set_verbosity_error()
    architecture = load.read_config(config.model)
    # First what cannot be traced: some of it asks the device, and there need not be one.
    if problems := refused(config) or setup_problems(config, architecture, topology, device="cuda"):
        raise ConfigError.of(problems)
    outline: Any = load.outline(architecture, trust_remote_code=config.model.trust_remote_code)
    parameters = sum(parameter.numel() for parameter in outline.parameters())
    asked, own = config.train.micro_batch, config.train.global_batch // topology.dp
    found = trace(config, architecture, topology, micro_batch=own if asked == "auto" else asked)
    return architecture.model_type, parameters, flops_of(outline).per_token(causal_keys(config.data.seq_len)), found


def _lines(config: Config, found: Traced) -> list[str]:
    rest = found.peak_bytes - found.parameters_bytes - found.optimizer_bytes
    lines = [
        f"  {config.train.global_batch} rows of {config.data.seq_len} tokens a step, {config.model.dtype}, "
        f"checkpointing {config.train.activation_checkpointing}",
        f"a rank holds at its peak       {_gib(found.peak_bytes)}",
        f"  its part of the weights      {_gib(found.parameters_bytes)}",
        f"  its part of the moments      {_gib(found.optimizer_bytes)}",
        f"  what lives in the step       {_gib(rest)}   activations, gathered weights, gradients "
        f"({found.gradients_bytes / 2**30:.2f} GiB when complete)",
    ]
    if found.sent:
        lines.append("a rank sends in a step, in whole tensors of an axis")
        lines += [
            f"  {axis:12} {kind:15} {calls:6} calls {_gib(size)}" for (axis, kind), (calls, size) in found.sent.items()
        ]
    return lines


def _gib(size: int) -> str:
    return f"{size / 2**30:9.2f} GiB"


def _compute(
    config: Config, topology: Topology, flops: float, device: Accelerator | None, gpu: str, found: Traced
) -> list[str]:
    tokens = config.train.global_batch * config.data.seq_len
    each = flops * tokens / topology.world_size
    lines = [f"a rank computes in a step      {each / 1e12:9.2f} TFLOP, without what is computed again"]
    if device is None:
        return lines
    whole, peak = device.memory_bytes / 2**30, found.peak_bytes / 2**30
    lines.append(f"  at least {each / device.bfloat16:.3f} s, at the peak of {gpu}")
    if peak > whole:
        return [*lines, f"it does not fit on {gpu}: {peak:.2f} GiB, and the device has {whole:.0f}"]
    left = f"{whole - peak:.2f} are left for the driver, buffers of collectives and what the allocator rounds up"
    return [*lines, f"it fits on {gpu}: of {whole:.0f} GiB, {left}"]
