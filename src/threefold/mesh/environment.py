"""Who started this process, and with which settings: the only reader of the environment.

`read` turns a launcher's variables into a `LaunchInfo` (`launchers.readers`), `managed_job` those of a managed job into
its folders and settings (`launchers.managed`). Where there is no launcher, `local_ranks` starts ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from threefold.errors import ConfigError
from threefold.mesh.launchers.info import LaunchInfo
from threefold.mesh.launchers.managed import Managed, Setting, managed
from threefold.mesh.launchers.managed import data_path as path_of_source
from threefold.mesh.launchers.managed import defaults as suggested
from threefold.mesh.launchers.readers import read

__all__ = ["LaunchInfo", "Managed", "read"]


def current() -> LaunchInfo:
    """What the launcher of this very process says."""
    info = read(os.environ)
    return info if info.host else dataclasses.replace(info, host=socket.gethostname())


def variables() -> Mapping[str, str]:
    """The environment, for those who look up their own variables in it."""
    return os.environ


def managed_job() -> Managed | None:
    """The managed job (SageMaker) that this process is a part of."""
    return managed(os.environ)


def defaults() -> tuple[Setting, ...]:
    """What this process' launcher suggests for keys of the config that are left open."""
    return suggested(os.environ)


def settings() -> tuple[Setting, ...]:
    """What the managed job of this process says about keys of the config."""
    job = managed_job()
    return job.settings if job is not None else ()


def tell_failure(text: str) -> None:
    """Leaves a failure's reason where the owner of a managed job is shown it; without one does nothing."""
    with contextlib.suppress(ConfigError):
        if (job := managed_job()) is not None:
            job.tell_failure(text)


def data_path(source: str) -> str:
    """The folder of a managed job's `channel:NAME`; any other source as it is."""
    return path_of_source(source, os.environ)


def settle_rank(info: LaunchInfo) -> None:
    """Prepares this process, which a launcher has started, for torch; called before torch is imported.

    torchrun gives its ranks one thread each. Others give none, and every rank would take all cores of its host.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    cores = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    os.environ.setdefault("OMP_NUM_THREADS", str(own if own < cores else max(1, cores // info.local_world_size)))


def accept_local_rank(value: int) -> None:
    """Takes the `--local_rank` that older launchers put on the command line, as LOCAL_RANK.

    Raises:
        ConfigError: LOCAL_RANK says otherwise, or no launcher has started this process.
    """
    said = os.environ.get("LOCAL_RANK")
    if said is None and "RANK" not in os.environ:
        raise ConfigError(
            f"--local_rank {value}, but no launcher has started this process: RANK is not set",
            expected="an option that a launcher adds by itself",
            fix="leave --local_rank out, or start with torchrun --nproc_per_node=N -m threefold ...",
        )
    if said is not None and said != str(value):
        raise ConfigError(
            f"--local_rank {value}, but LOCAL_RANK = {said}",
            expected="the same number: it is the device that this rank takes",
            fix="leave --local_rank out: LOCAL_RANK is what counts",
        )
    # What launchers have set by themselves since they no longer use the option.
    os.environ["LOCAL_RANK"] = str(value)


def make_products_deterministic() -> None:
    """Gives cuBLAS a workspace of fixed size, without which its products may differ from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def cache_folder() -> Path:
    """Where prepared data is kept between runs: $XDG_CACHE_HOME/threefold, or ~/.cache/threefold."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "threefold"
