"""Who started this process, and with which settings: the only reader of the environment.

`read` turns a launcher's variables into a `LaunchInfo`. `launchers.managed` reads a managed job's folders and settings
and accelerate's mesh. Without a launcher, `local_ranks` starts ranks.
"""

import contextlib
import dataclasses
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from threefold.errors import ConfigError
from threefold.mesh.launchers import managed
from threefold.mesh.launchers.info import LaunchInfo as LaunchInfo
from threefold.mesh.launchers.readers import read as read

LOOPBACK = "127.0.0.1"
_LEAST_TOKEN = 16
_OPEN_FILES = 65_536
# The user's own values that `stay_on_loopback` has put others in place of.
replaced: dict[str, str] = {}


def current() -> LaunchInfo:
    """This very process as its launcher describes it."""
    info = read(os.environ)
    return info if info.host else dataclasses.replace(info, host=socket.gethostname())


def variables() -> Mapping[str, str]:
    """The environment, for callers that look up their own variables in it."""
    return os.environ


def managed_job() -> managed.Managed | None:
    """The managed job (SageMaker) that this process is a part of."""
    return managed.managed(os.environ) if "SM_HPS" in os.environ else None


def defaults() -> tuple[managed.Setting, ...]:
    """The launcher's suggestions for keys that the config leaves open."""
    suggests = any(name.startswith(("SM_HPS", "PARALLELISM_CONFIG_")) for name in os.environ)
    return managed.defaults(os.environ) if suggests else ()


def settings() -> tuple[managed.Setting, ...]:
    """The keys of the config that this process' managed job sets."""
    job = managed_job()
    return job.settings if job is not None else ()


def restarted_job() -> str | None:
    """The job that this process is a restart of, by its scheduler or launcher; None at a first start."""
    if (count := os.environ.get("SLURM_RESTART_COUNT", "0")).isdigit() and int(count):
        return f"slurm {os.environ.get('SLURM_JOB_ID', '')}"
    return job() if current().restart else None


def job() -> str | None:
    """The job that this process belongs to, by the number that its scheduler or launcher keeps over restarts."""
    for launcher, name in (("slurm", "SLURM_JOB_ID"), ("torchrun", "TORCHELASTIC_RUN_ID")):
        if number := os.environ.get(name):
            return f"{launcher} {number}"
    return None


def tell_failure(text: str) -> None:
    """Writes a failure's reason where the owner of a managed job sees it; without such a job does nothing."""
    with contextlib.suppress(ConfigError):
        if (job := managed_job()) is not None:
            job.tell_failure(text)


def data_path(source: str) -> str:
    """The folder of a managed job's `channel:NAME`; any other source unchanged."""
    return (
        managed.data_path(source, os.environ) if source.startswith(managed.CHANNEL) else source
    )


def settle_rank(info: LaunchInfo) -> None:
    """Prepares this process, which a launcher has started, for torch; called before torch is imported.

    torchrun gives each rank one thread. Other launchers set nothing, and every rank would use all cores of its host.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    cores, own = os.cpu_count() or 1, num_cores()
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(own if own < cores else max(1, cores // info.local_world_size))
    )


def num_cores() -> int:
    """The cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def stay_on_loopback(*, asked: bool = False) -> None:
    """Lets gloo and NCCL of this process listen on the loopback interface only: all ranks are on this machine.

    Args:
        asked: leave an interface that the user has named.
    """
    names = [name for _, name in socket.if_nameindex()]
    if (loopback := next((name for name in ("lo", "lo0") if name in names), None)) is not None:
        # NCCL treats a name as a prefix by default.
        for variable, value in (
            ("GLOO_SOCKET_IFNAME", loopback),
            ("NCCL_SOCKET_IFNAME", f"={loopback}"),
        ):
            own = os.environ.get(variable, value)
            if not asked or variable not in os.environ:
                os.environ[variable] = value
                replaced.update({variable: own} if own != value else {})


def allow_open_files() -> int:
    """Raises this process's soft limit of open files, which is often 1,024, and returns the limit.

    Each connection to another rank takes one, of which a run on a thousand ranks has more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return limit
    if soft < limit:
        with contextlib.suppress(ValueError, OSError):  # a kernel may take less than it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def namespace_here(kind: str) -> str | None:
    """Names what this process shares with others of its machine; None if that cannot be known.

    Args:
        kind: `net`, the network stack; `pid`, the processes that it sees: of its host, and of its container.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns', kind).stat().st_ino}"
    except OSError:
        return None


def token() -> bytes | None:
    """The secret that ranks of a run need to meet: THREEFOLD_TOKEN, or the content of the file THREEFOLD_TOKEN_FILE.

    Raises:
        ConfigError: it is short, or in a file that cannot be read, or that others can read.
    """
    name = "THREEFOLD_TOKEN"
    fix = "export THREEFOLD_TOKEN=$(openssl rand -hex 32)   (the same on every host)"
    secret = os.environ.get(name)
    if secret is None and (path := os.environ.get("THREEFOLD_TOKEN_FILE")) is not None:
        name = f"THREEFOLD_TOKEN_FILE = {path}"
        fix = f"(umask 077; openssl rand -hex 32 > {path})"
        try:
            if Path(path).stat().st_mode & 0o077:
                raise ConfigError(
                    f"{name} can be read by others",
                    expected="a file that only its owner can read: anyone who knows the token can join the run",
                    fix=f"chmod 600 {path}",
                )
            secret = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise ConfigError(
                f"{name}: {reason}", expected="a file with the token", fix=fix
            ) from error
    if secret is None:
        return None
    if len(secret := secret.strip()) < _LEAST_TOKEN:
        raise ConfigError(
            f"{name} has {len(secret)} characters",
            expected=f"at least {_LEAST_TOKEN} random ones",
            fix=fix,
        )
    return secret.encode()


def accept_local_rank(value: int) -> None:
    """Sets LOCAL_RANK to the `--local_rank` that older launchers put on the command line.

    Raises:
        ConfigError: LOCAL_RANK differs, or no launcher has started this process.
    """
    own = os.environ.get("LOCAL_RANK")
    if own is None and "RANK" not in os.environ:
        raise ConfigError(
            f"--local_rank {value}, but no launcher has started this process: RANK is not set",
            expected="an option that only launchers add",
            fix="leave --local_rank out, or start with torchrun --nproc_per_node=N -m threefold ...",
        )
    if own is not None and own != str(value):
        raise ConfigError(
            f"--local_rank {value}, but LOCAL_RANK = {own}",
            expected="the same number: it is the device that this rank uses",
            fix="leave --local_rank out: LOCAL_RANK is what counts",
        )
    # As newer launchers do, which no longer use the option.
    os.environ["LOCAL_RANK"] = str(value)


def make_products_deterministic() -> None:
    """Gives cuBLAS a workspace of fixed size; otherwise its products may differ from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def record_collectives() -> None:
    """Lets torch keep what it knows of the last collectives (Flight Recorder), which a stall is explained with."""
    # The default from torch 2.12 on; under the older name, a user may have set another number.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")


def keep_compiled() -> None:
    """Keeps compiled kernels between runs, in TORCHINDUCTOR_CACHE_DIR or below `cache_folder`.

    Not in a run's folder: torch executes its cached code, and a folder may come from somebody else.
    """
    folder = cache_folder() / "compiled"
    with contextlib.suppress(OSError):  # then torch has its own folder
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def cache_folder() -> Path:
    """Where prepared data is kept between runs: $XDG_CACHE_HOME/threefold, or ~/.cache/threefold."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "threefold"
