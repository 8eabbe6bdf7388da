"""What a rank's process is set to before it computes: what libraries may say, which kernels are used, its facts."""

from __future__ import annotations

import logging
import sys

import torch
import transformers
import xxhash

from threefold.build_id import build_id
from threefold.checkpoint.manifest import versions
from threefold.config.schema import Config
from threefold.mesh import environment

log = logging.getLogger("threefold")


def facts_of(config: Config) -> dict[str, str]:
    """Returns what must be the same on every rank besides the mesh: the version, and a digest per config section."""
    sections = {name: getattr(config, name).model_dump_json().encode() for name in type(config).model_fields}
    digests = {f"the config's section {name!r}": xxhash.xxh3_64_hexdigest(text) for name, text in sections.items()}
    if config.train.reduce == "exact":
        of_bits = [versions()[name] for name in ("torch", "transformers", "cpu")]
        digests["what the bits of train.reduce exact depend on"] = ", ".join(of_bits)
    return {"threefold": build_id(), **digests}


def quieten_libraries(*, shown: bool = False) -> None:
    """Sends the libraries' warnings to the rank's log file; `shown`: their bars of downloads stay."""
    # On the terminal, eight ranks would print each warning eight times.
    logging.captureWarnings(True)
    log.addHandler(logging.NullHandler())  # until the run's folder is known
    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    if not (shown and sys.stderr.isatty()):
        transformers.utils.logging.disable_progress_bar()


def compute_alike(config: Config) -> None:
    """Lets torch compute the same each time, if that is asked for, and with `train.reduce: exact` on any mesh.dp."""
    if config.train.deterministic or config.train.reduce == "exact":
        environment.make_products_deterministic()
        torch.use_deterministic_algorithms(True)
        # Else each tensor is filled before it is written: a 20th of a step, for code that reads what nobody wrote.
        torch.utils.deterministic.fill_uninitialized_memory = False
    if config.train.reduce == "exact":
        torch.set_num_threads(1)  # how many there are depends on the number of ranks, and products on how many
