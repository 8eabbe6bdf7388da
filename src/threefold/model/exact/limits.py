"""Models that `train.reduce: exact` does not support, and its line in the head of a run."""

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from threefold.config.schema import Config
from threefold.errors import Problem
from threefold.mesh.exact_limits import cuda_problem
from threefold.mesh.topology import Topology
from threefold.model.precision import kept_in_float32
from threefold.plan.families import EXACT

_FAST = "--train.reduce fast"


def problems(
    config: Config, architecture: PretrainedConfig, outline: Any, *, device: str
) -> Iterator[Problem]:
    """Why gradients of this model would not have the bits that train.reduce exact promises; empty if they have.

    Args:
        outline: the model without values.
    """
    if config.train.reduce != "exact":
        return
    if device == "cuda" and config.mesh.device != "cuda":
        yield cuda_problem()
    kind, asked = architecture.model_type, "train.reduce = exact"
    if kind not in EXACT:
        expected = f"one of {', '.join(EXACT)}, whose bits were compared on several meshes"
        yield Problem(f"{asked} with a model of the type {kind!r}", expected, _FAST)
    if config.model.dtype == "bfloat16":
        kept = kept_in_float32(outline) & {name for name, _ in outline.named_parameters()}
        if kept:
            yield Problem(
                f"{asked} with bfloat16 and {min(kept)} in float32",
                "weights that FSDP2 casts and sums: those that stay float32 are averaged in floating point",
                f"--model.dtype float32, or {_FAST}",
            )


def described(config: Config, topology: Topology) -> tuple[str, str]:
    """(what, why) of exact sums, to be printed: what the bits depend on, and the price."""
    size, dtype = config.train.micro_batch, config.model.dtype
    axes = f"cp {topology.cp}, tp {topology.tp}"
    depends = (
        f"train.micro_batch {size}, {dtype}, {axes}, and of this kind of CPU and this torch"
    )
    price = "8 bytes more a parameter, shared over dp_shard, and 8 sent where fast sends 4"
    return (
        "reduce: exact",
        f"the same bits on any number of data ranks of {depends}; {price}; one thread a rank",
    )
