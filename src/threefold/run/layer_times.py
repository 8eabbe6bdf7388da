"""Measured times of a model's layers on this machine's device, beside the estimate from published speeds.

Two models with a few of its layers take real steps, with the dtype, kernels and compilation of a run; the difference
in time is that of the additional layers. So neither work outside of the layers nor the fixed cost of a step is in
either figure.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.mesh.mesh import Mesh, init_mesh
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.model.build import build
from threefold.model.layer_kinds import cut_depth, kept_layers
from threefold.plan.accelerators import Accelerator
from threefold.plan.adapters import adapted
from threefold.plan.advise import THERE
from threefold.plan.decoder import Decoder, decoder_of
from threefold.plan.duration import duration
from threefold.plan.fabric import Fabric
from threefold.plan.memory import peak
from threefold.plan.setup import Setup, setup_of
from threefold.run.assemble import optimizer_of
from threefold.training.step import TrainStep

_ALONE = Topology(1, 1, 1, 1)
_WARM, _TIMED = 3, 15  # steps
# Spread of the middle half of the measurements, as a share of their median.
_SPREAD = 0.1
# Vocabulary entries: the head is not measured, and needs memory.
_VOCABULARY = 1024


def require_here(device: Accelerator, name: str) -> None:
    """Raises ConfigError unless this machine's first CUDA device is of that kind."""
    expected = f"a {device.sign} in this machine: the plan is for the device that is measured"
    fix = "leave --measure out, for published speeds; or plan on such a machine"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--gpu {name} --measure, but torch sees no CUDA device here",
            expected=expected,
            fix=fix,
        )
    here = torch.cuda.get_device_name()
    if device.sign not in here:
        raise ConfigError(
            f"--gpu {name} --measure, but the device here is {here!r}",
            expected=expected,
            fix=fix,
        )


def slowness(
    config: Config, values: dict[str, Any], device: Accelerator, *, kind: str = "cuda"
) -> float:
    """How many times as long layers take, forward, backward and update, as is estimated of them.

    Args:
        config: of the run, with its type; its rows, length, adapters and optimizer count too.
        values: the object of the model's config.json.
        kind: of this machine's device.

    Raises:
        ConfigError: not even two layers fit, or other work on the device hides what layers take.
    """
    few, many = _depths(config, values, device)
    mesh = init_mesh(1, device=kind)
    try:
        steps = [_step_of(each, mesh) for each in (few, many)]
        # By turns: what else the device does meets both.
        times = [[_seconds(step) for step in steps] for _ in range(_WARM + _TIMED)][_WARM:]
    except torch.OutOfMemoryError as error:
        raise _too_large(values, str(error).partition(".")[0]) from error
    finally:
        mesh.close()
    low, median, high = statistics.quantiles((deep - shallow for shallow, deep in times), n=4)
    if median <= 0 or high - low > _SPREAD * median:
        raise ConfigError(
            f"layer times on this device vary from {low:.4f} to {high:.4f} s",
            expected=f"half of the measurements within {_SPREAD:.0%}, as on an idle device",
            fix="repeat it when nothing else runs on it; or leave --measure out, for published speeds",
        )
    return median / (_estimate(many, device) - _estimate(few, device))


def _depths(
    config: Config, values: dict[str, Any], device: Accelerator
) -> tuple[Config, Config]:
    """The depths of two models: the first layers up to one of each kind, or one layer; and twice as many."""
    depth = int(values["num_hidden_layers"])
    for number in dict.fromkeys((max(kept_layers(values)) + 1, 1)):
        few, many = (
            _cut(config, values, min(depth, each), depth) for each in (number, 2 * number)
        )
        needed = sum(peak(*_asked(each, device)).total for each in (few, many))
        if 2 * number <= depth and needed <= THERE * device.memory_bytes:
            return few, many
    raise _too_large(values, f"{device.memory_bytes / 2**30:.0f} GiB are not enough")


def _too_large(values: dict[str, Any], why: str) -> ConfigError:
    return ConfigError(
        f"two layers of {values['model_type']!r} cannot be measured here: {why}",
        expected="a model of two layers, its gradients and moments on one device",
        fix="--train.micro_batch 1   (or leave --measure out)",
    )


def _cut(config: Config, values: dict[str, Any], kept: int, depth: int) -> Config:
    """A run of one process, in micro-batches as asked for or of one row, with the first layers alone."""
    cut = {
        name: cut_depth(name, value, [*range(kept)], depth) for name, value in values.items()
    }
    cut = {name: None if name.endswith("_token_id") else value for name, value in cut.items()}
    cut["vocab_size"] = min(_VOCABULARY, int(values["vocab_size"]))
    asked = config.train.micro_batch
    rows = asked if isinstance(asked, int) else 1
    return config.changed(
        model={"name_or_path": None, "config": cut},
        mesh={"dp": 1, "dp_shard": 1, "cp": 1, "tp": 1, "cpu_offload": False},
        train={"global_batch": rows, "micro_batch": rows, "activation_checkpointing": "none"},
    )


def _asked(config: Config, device: Accelerator) -> tuple[Decoder, Setup]:
    decoder = adapted(decoder_of(config.model.config or {}), config.model.lora)
    return decoder, setup_of(config, decoder, _ALONE, device)


def _estimate(config: Config, device: Accelerator) -> float:
    """Seconds of a step, from published speeds."""
    return duration(*_asked(config, device), Fabric(1, device.link, device.link)).total


def _step_of(config: Config, mesh: Mesh) -> Callable[[], None]:
    """A function that takes one step of a run, to its end."""
    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, optimizer_of(config, model), compare_copies=False)
    ids = torch.randint(
        _VOCABULARY // 2,
        (config.train.global_batch, config.data.seq_len + 1),
        device=mesh.device,
    )
    batches = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}]

    def run() -> None:
        step.run(batches)
        if mesh.on_cuda:
            torch.cuda.synchronize()

    return run


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
