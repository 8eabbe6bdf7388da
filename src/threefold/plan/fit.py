"""What would fit: set-ups that need less memory than one that does not, and their config keys.

For a run that is refused before it begins, for one whose device has no memory left, and for `threefold plan`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.jsonl import Values
from threefold.mesh.topology import Topology
from threefold.plan.accelerators import Accelerator
from threefold.plan.adapters import adapted
from threefold.plan.decoder import Decoder, decoder_of
from threefold.plan.memory import peak
from threefold.plan.setup import Setup, checked

# Of activation checkpointing, by how much each saves, and costs.
MODES = ("none", "selective", "full", "offload")
MORE_RANKS = "more ranks: threefold plan shows what fits on which devices"


def estimate_of(
    config: Config, values: Values, topology: Topology, device: Accelerator | None
) -> tuple[Decoder, Setup] | None:
    """A model and its set-up, from its config.json's values; None if they cannot be estimated."""
    try:
        decoder = adapted(decoder_of(values), config.model.lora)
        return decoder, checked(config, decoder, topology, device)
    except ConfigError:
        return None


def keys_of(setup: Setup) -> Values:
    """The keys of a config that ask for a set-up."""
    topology = setup.topology
    return {
        "mesh.dp": topology.dp,
        "mesh.dp_shard": topology.dp_shard,
        "mesh.cp": topology.cp,
        "mesh.tp": topology.tp,
        "mesh.cpu_offload": setup.cpu_offload,
        "train.activation_checkpointing": setup.recompute,
        "train.micro_batch": setup.micro_batch,
    }


def changed_keys(setup: Setup, other: Setup) -> Values:
    """The keys, with their values, that make the other set-up of this one."""
    before = keys_of(setup)
    changed = {key: value for key, value in keys_of(other).items() if value != before[key]}
    if "mesh.dp_shard" in changed and other.topology.dp_replicate > 1:
        return {"mesh.dp": other.topology.dp} | changed  # without it there is one replica
    return changed


def as_options(keys: Values) -> str:
    """To paste into a command."""
    return " ".join(f"--{key} {str(value).lower()}" for key, value in keys.items())


def row_counts(setup: Setup) -> list[int]:
    """Micro-batches that divide the rows of a dp rank, the largest first."""
    rows = setup.micro_batch * setup.num_batches
    return [size for size in range(rows, 0, -1) if rows % size == 0]


def with_rows(setup: Setup, size: int) -> Setup:
    """With this many rows per forward, and the resulting number of forwards per step."""
    return replace(
        setup, micro_batch=size, num_batches=setup.micro_batch * setup.num_batches // size
    )


def largest_micro_batch(decoder: Decoder, setup: Setup, free: float) -> Setup:
    """With all rows of a dp rank at once, or as many as fit; one, if none does."""
    sizes = (with_rows(setup, size) for size in row_counts(setup))
    return next(
        (smaller for smaller in sizes if peak(decoder, smaller).total <= free),
        with_rows(setup, 1),
    )


def what_fits(decoder: Decoder | None, setup: Setup, free: float) -> str:
    """Options to paste, the fewest whose set-up is estimated to fit; or that more ranks are needed.

    Of a model that cannot be estimated (None) the first that needs less.
    """
    smaller = smaller_setups(setup)
    fitting = next(
        (less for less in smaller if decoder is None or peak(decoder, less).total <= free), None
    )
    return MORE_RANKS if fitting is None else as_options(changed_keys(setup, fitting))


def smaller_setups(setup: Setup) -> Iterator[Setup]:
    """Set-ups that need less, on the same ranks: the fewest changes first, and of as many those that cost least."""
    topology, device = setup.topology, setup.device
    sharded = replace(topology, dp_replicate=1, dp_shard=topology.dp)
    meshes = list(dict.fromkeys((topology, sharded)))
    # A CPU's memory is the host's.
    offloads = (setup.cpu_offload,) if setup.cpu_offload or device is None else (False, True)
    modes = MODES[MODES.index(setup.recompute) : len(MODES) - (device is None)]
    sizes = [size for size in row_counts(setup) if size <= setup.micro_batch]
    # Places in these lists; sharding comes first among as many changes, as it has no price in the list.
    places = itertools.product(
        *(range(len(options)) for options in (meshes, offloads, modes, sizes))
    )
    by_price = sorted(places, key=lambda place: (sum(map(bool, place)), *place[1:]))
    for mesh, offload, mode, size in by_price[1:]:
        yield replace(
            with_rows(setup, sizes[size]),
            topology=meshes[mesh],
            cpu_offload=offloads[offload],
            recompute=modes[mode],
        )
