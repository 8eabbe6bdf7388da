"""Setup of a rank's process before it computes: logging of libraries, choice of kernels, its facts.

And a rank of a command that does not train: it joins the mesh, works, and reports a failure once for all ranks.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
import xxhash

from threefold.build_id import build_id
from threefold.checkpoint.manifest import versions
from threefold.config.schema import Config
from threefold.errors import ThreefoldError
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh, join_mesh
from threefold.mesh.topology import Topology
from threefold.progress_bars import print_any_text
from threefold.run.failure import report_failure
from threefold.run.watch.watchdog import Watchdog

log = logging.getLogger("threefold")


def facts_of(config: Config) -> dict[str, str]:
    """Returns what must be the same on every rank besides the mesh: the version, and a digest per config section."""
    sections = {
        name: getattr(config, name).model_dump_json().encode()
        for name in type(config).model_fields
    }
    digests = {
        f"the config's section {name!r}": xxhash.xxh3_64_hexdigest(text)
        for name, text in sections.items()
    }
    if config.train.exact:
        of_bits = [versions()[name] for name in ("torch", "transformers", "cpu")]
        digests["what the bits of train.reduce exact depend on"] = ", ".join(of_bits)
    return {"threefold": build_id(), **digests}


def quieten_libraries(*, shown: bool = False) -> None:
    """Sends the libraries' warnings to the rank's log file; `shown`: their bars of downloads stay."""
    # On the terminal, eight ranks would print each warning eight times.
    logging.captureWarnings(True)
    print_any_text()
    log.addHandler(logging.NullHandler())  # until the run's folder is known
    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    if not (shown and sys.stderr.isatty()):
        transformers.utils.logging.disable_progress_bar()


def compute_alike(config: Config) -> None:
    """Lets torch compute the same each time, if that is asked for, and with `train.reduce: exact` on any mesh.dp."""
    if config.train.deterministic or config.train.exact:
        environment.make_products_deterministic()
        torch.use_deterministic_algorithms(True)
        # Else each tensor is filled before it is written: a 20th of a step, for code that reads uninitialised memory.
        torch.utils.deterministic.fill_uninitialized_memory = False
    if config.train.exact:
        # How many there are depends on the number of ranks, and products on how many.
        torch.set_num_threads(1)


def stay_near(device: torch.device, system: Path = Path("/sys")) -> None:
    """Binds this process' threads, and what they start later, to the cores of its CUDA device's NUMA node; logs it.

    Does nothing in a process that was bound already: it may not use all cores of that node and of another one. What
    torch.numa has for it is not public, and fails where numactl is not installed.
    """
    gpu = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        # -1: not known.
        node = (system / "bus/pci/devices" / address / "numa_node").read_text().strip()
        lists = {
            path.parent.name: path.read_text().strip()
            for path in system.glob("devices/system/node/*/cpulist")
        }
    except OSError:
        return
    own = os.sched_getaffinity(0)
    whole = {
        name: cores
        for name, listed in lists.items()
        if (cores := _cores(listed)) and cores <= own
    }
    near = whole.get(f"node{node}")
    if near is None or len(whole) == 1:
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it has ended
            if os.sched_getaffinity(thread) == own:  # NCCL binds its own
                os.sched_setaffinity(thread, near)
    log.info(
        "bound to the cores of NUMA node %s, where %s is: %s",
        node,
        device,
        lists[f"node{node}"],
    )


def _cores(listed: str) -> set[int]:
    """Core numbers from the kernel's list: `0-31,64-95`."""
    spans = [span.split("-") for span in listed.split(",") if span]
    return {
        core for first, *last in spans for core in range(int(first), int(*last or [first]) + 1)
    }


def as_rank(config: Config, topology: Topology, work: Callable[[Mesh], int]) -> int:
    """Returns the exit code of `work` on the mesh, or of its failure."""

    def and_leave(mesh: Mesh) -> int:
        code = work(mesh)
        mesh.barrier()
        mesh.close()
        return code

    quieten_libraries()
    return joined(config, topology, and_leave)


def joined(
    config: Config,
    topology: Topology,
    work: Callable[[Mesh], int],
    watch: Watchdog | None = None,
    *,
    keep: str | None = None,
) -> int:
    """Joins the mesh, and returns the exit code of `work` there, or of a failure; `keep`: as for `report_failure`."""
    info, asked = environment.current(), config.mesh
    mesh: Mesh | None = None
    try:
        mesh = join_mesh(
            topology,
            info,
            device=asked.device,
            timeout_s=asked.timeout_s,
            facts=facts_of(config),
            met=watch.begin if watch is not None else None,
        )
        return work(mesh)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        code = report_failure(error, mesh, info.rank, watch, keep=keep)
        if isinstance(error, ThreefoldError) and mesh is not None:
            mesh.abandon()
        return code
