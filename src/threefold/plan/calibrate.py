"""How much longer a run computed than is estimated for it: a factor for estimates on the same kind of device."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from threefold.config.loading import load
from threefold.config.paths import RUN_CONFIG
from threefold.errors import ConfigError
from threefold.mesh.topology import resolve
from threefold.plan.accelerators import Accelerator
from threefold.plan.decoder import decoder_of
from threefold.plan.duration import duration
from threefold.plan.fabric import Fabric
from threefold.plan.operations import causal_keys
from threefold.plan.setup import checked
from threefold.records import metrics

# Of its logged steps, those that warm up are left out.
_FIRST = 2


def slower_than_estimated(run: Path, values: dict[str, Any], device: Accelerator, fabric: Fabric) -> float:
    """Measured over estimated seconds of computing in a step, by the median of a run's metrics.

    Args:
        run: its folder.
        values: of its model's config.json, which is the model that is asked about.

    Raises:
        ConfigError: it is no run, was on another kind of device, or its mesh is not in its config.
    """
    expected = "the folder of a run of this model on this kind of device, with metrics.jsonl"
    try:
        config = load(str(run / RUN_CONFIG), environ={}).config
        lines = [line for line in metrics.read(run).steps.values() if "step_time_s" in line and "mfu" in line]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibrate {run}: {error}", expected=expected, fix="check the path") from error
    if len(lines) <= _FIRST:
        what = f"--calibrate {run}: {len(lines)} steps with an MFU, which CPUs and unknown devices have not"
        raise ConfigError(what, expected=expected, fix="--log.every 1 in the run, for more than 2 steps")
    mesh = config.mesh
    if not any(isinstance(size, int) for size in (mesh.dp, mesh.dp_shard)) or "auto" in (mesh.dp, mesh.cp, mesh.tp):
        what = f"--calibrate {run}: its config does not say how many ranks it had"
        raise ConfigError(what, expected="mesh.dp, mesh.cp and mesh.tp as numbers", fix="--mesh.dp N in the run")
    topology, _ = resolve(mesh, launched_world_size=None, num_devices=None)
    decoder = decoder_of(values)
    setup = checked(config, decoder, topology, device)
    steady = lines[_FIRST:]
    each = decoder.flops.per_token(causal_keys(config.data.seq_len))
    implied = statistics.median(line["tokens_per_s"] * each / line["mfu"] for line in steady) / topology.world_size
    if not 0.97 < implied / device.bfloat16 < 1.03:
        what = (
            f"--calibrate {run}: its MFU is of a peak of {implied / 1e12:.0f} TFLOP/s, not {device.bfloat16 / 1e12:.0f}"
        )
        raise ConfigError(what, expected=expected, fix="--gpu with the device of that run, and its model")
    estimated = duration(decoder, setup, fabric)
    measured = statistics.median(line["step_time_s"] for line in steady)
    return max(0.1, measured - (estimated.total - estimated.computing)) / estimated.computing
