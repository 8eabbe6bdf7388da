"""The resolved values of a config's automatic keys on a machine, with reasons, for `--print-config`. No torch."""

from threefold.config.paths import tokenizer_name
from threefold.config.schema import DEFAULT_STEPS, Config, value_at
from threefold.config.yaml_text import as_yaml
from threefold.mesh import topology
from threefold.plan.choices import Device, resolve


def automatic(
    config: Config, *, launched_world_size: int | None, num_devices: int | None
) -> dict[str, str]:
    """section.key -> `value: reason` of each automatic key that is settled before the model and the data are read.

    Raises:
        ConfigError: the sizes of the mesh do not match; the arguments are those of `mesh.topology.resolve`.
    """
    mesh, why = topology.resolve(
        config.mesh, launched_world_size=launched_world_size, num_devices=num_devices
    )
    kind = "cuda" if num_devices else "cpu"
    choices = resolve(config, mesh, Device.here(kind))
    decided = {
        "data.tokenizer": tokenizer_name(config),
        "mesh.device": (kind, f"torch sees {num_devices or 'no'} CUDA devices"),
        "mesh.sequence_parallel": choices.sequence_parallel,
        "train.micro_batch": choices.micro_batch,
        "train.compile": choices.compiled,
        "model.dtype": choices.dtype,
        "model.attention": choices.attention,
        "optimizer.lr": config.peak_rate,
    }
    decided |= {
        f"mesh.{axis}": (getattr(mesh, axis), why) for axis in ("dp", "dp_shard", "cp", "tp")
    }
    if config.train.epochs is None:
        decided["train.steps"] = DEFAULT_STEPS, "neither steps nor epochs were given"
    if mesh.cp == 1:  # else it depends on the model's heads
        decided["mesh.cp_method"] = choices.cp_method
    return {
        key: f"{as_yaml(value)}: {reason}"
        for key, (value, reason) in decided.items()
        if value_at(config, key) in (None, "auto")
    }
