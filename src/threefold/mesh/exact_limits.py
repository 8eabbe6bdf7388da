"""Settings that `train.reduce: exact` cannot be combined with, as far as a config and a mesh show. No torch.

Each of these is allowed once the bits of whole runs on several meshes have been compared with it; until then, refused.
"""

from collections.abc import Iterator
from typing import Any

from threefold.config.optimizer import OPTIMIZERS
from threefold.config.schema import Config, value_at
from threefold.config.yaml_text import as_yaml
from threefold.errors import Problem
from threefold.mesh.topology import Topology

# Sums of so many micro-batches leave at least 40 binary places.
MOST_MICRO_BATCHES = 2**14
# Along cp and tp, whose ranks add floats to one another: a + b is b + a, and of three numbers there are three sums.
MOST_RANKS = 2
# Every number is updated by itself, by operations that are rounded one at a time.
_OPTIMIZERS = tuple(name for name, each in OPTIMIZERS.items() if each.exact_path is not None)
# Key, the values that were compared, and why others may have other bits, or what was not compared.
_COMPARED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("train.objective", ("next_token",), "the sums of pairs are floating point"),
    ("train.compile", ("auto", False), "compiled layers were not compared"),
    ("train.float8", ("none",), "products in 8 bits were not compared"),
    ("train.fused_loss", ("auto", False), "the kernels were not compared"),
    (
        "train.activation_checkpointing",
        ("none", "full", "selective"),
        "activations on the host were not compared",
    ),
    (
        "model.trust_remote_code",
        (False,),
        "a model's own code may draw its own random numbers, or add in any order",
    ),
    ("model.attention", ("auto", "sdpa"), "attention by blocks was not compared"),
    ("mesh.ep", (1,), "experts on several ranks were not compared"),
    ("mesh.sequence_parallel", ("auto", True, False), "sums that overlap were not compared"),
    ("mesh.cpu_offload", (False,), "shards in the host's memory were not compared"),
    ("optimizer.name", _OPTIMIZERS, "what others compute may depend on the number of shards"),
    (
        "data.group_by_length",
        (False,),
        "a batch's length, and so its sums, would be compared on too few meshes",
    ),
)


def exact_problems(config: Config, topology: Topology) -> list[Problem]:
    """Why a config's run on this mesh would not have the bits that train.reduce exact promises; empty if it has."""
    return list(_problems(config, topology)) if config.train.exact else []


def _problems(config: Config, topology: Topology) -> Iterator[Problem]:
    asked, size = "train.reduce = exact", config.train.micro_batch
    if size == "auto":
        yield Problem(
            f"{asked} with train.micro_batch = auto, which depends on the number of data ranks",
            "rows of a micro-batch, whose gradient has the same bits anywhere",
            "--train.micro_batch 1",
        )
    elif config.train.global_batch // size > MOST_MICRO_BATCHES:
        least = -(-config.train.global_batch // MOST_MICRO_BATCHES)
        yield Problem(
            f"{asked} with {config.train.global_batch // size:,} micro-batches a step",
            f"at most {MOST_MICRO_BATCHES:,}, whose sum leaves 40 binary places below the largest gradient",
            f"--train.micro_batch {least}   (or a smaller train.global_batch)",
        )
    for axis, ranks in (("cp", topology.cp), ("tp", topology.tp)):
        if ranks > MOST_RANKS:
            yield Problem(
                f"{asked} with mesh.{axis} = {ranks}",
                f"mesh.{axis} 1 or 2: with more ranks, floats are added in an order that may depend on mesh.dp",
                f"--mesh.{axis} {MOST_RANKS}, or {_FAST}",
            )
    if config.mesh.device == "cuda":
        yield cuda_problem()
    for key, compared, why in _COMPARED:
        if (value := value_at(config, key)) not in compared:
            yield Problem(
                f"{asked} with {key} = {as_yaml(value)}",
                f"{key} {' or '.join(map(as_yaml, compared))}: {why}",
                f"leave {key} out, or {_FAST}",
            )
    optimizer = OPTIMIZERS.get(config.optimizer.name)
    allowed = optimizer.exact_options if optimizer is not None else ()
    if strange := [
        key for key in config.optimizer.options if key not in allowed and optimizer is not None
    ]:
        yield Problem(
            f"{asked} with optimizer.options.{strange[0]} = {as_yaml(config.optimizer.options[strange[0]])}",
            f"of {config.optimizer.name} {', '.join(allowed) or 'none'}: its other options were not compared",
            f"leave {strange[0]} out of optimizer.options, or {_FAST}",
        )


_FAST = "--train.reduce fast"


def cuda_problem() -> Problem:
    """The problem of train.reduce exact on a CUDA device."""
    return Problem(
        "train.reduce = exact on cuda",
        "a CPU: no bits of several CUDA devices were compared yet",
        f"--mesh.device cpu, or {_FAST}",
    )
