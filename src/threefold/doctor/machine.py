"""This machine without torch: Python, memory, shared memory, files, disks, clock, tokens, other accelerators.

`look` reads the machine; `judge` only computes with the values, so that a test may judge another machine.
"""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from threefold.doctor.findings import Finding, Level, judged, note, warning
from threefold.errors import size_text
from threefold.mesh.environment import allow_open_files, num_cores

_SHM = Path("/dev/shm")
_LEAST_SHM = 1 << 30
_LEAST_FILES = 4096
_LEAST_DISK, _LITTLE_DISK = 1 << 30, 20 << 30
_TOKENS = {
    "Hugging Face": (("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), ("{HF_HOME}/token",)),
    "Weights & Biases": (("WANDB_API_KEY",), ("{HOME}/.netrc",)),
}


@dataclass(frozen=True)
class Machine:
    """This machine's report about itself; sizes in bytes, None for missing values."""

    host: str
    system: str
    python: str
    cores: int
    memory: int | None = None
    shared_memory: int | None = None
    open_files: int | None = None
    disks: Mapping[str, int] = field(default_factory=dict)
    clock_synchronized: bool | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    tpu: str | None = None


def look(environ: Mapping[str, str], *, folders: Mapping[str, Path]) -> Machine:
    """Reads this machine; `folders`: purpose -> folder (or its nearest parent that exists) whose free space counts."""
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cores=num_cores(),
        memory=_memory(),
        shared_memory=shutil.disk_usage(_SHM).free if _SHM.is_dir() else None,
        open_files=allow_open_files(),
        disks={f"{name} ({folder})": _free(folder) for name, folder in folders.items()},
        clock_synchronized=_clock_synchronized(),
        tokens=_tokens(environ),
        tpu=_tpu(environ),
    )


def judge(machine: Machine) -> list[Finding]:
    """What would keep a run from working on this machine."""
    return list(_judged(machine))


def _judged(machine: Machine) -> Iterator[Finding]:
    version = tuple(int(part) for part in machine.python.split(".")[:2])
    create = "create a virtual environment with a newer Python"
    yield judged("Python", machine.python, version >= (3, 11), "3.11 or newer", create)
    memory = f", {size_text(machine.memory)} of memory" if machine.memory is not None else ""
    yield note("machine", f"{machine.host}: {machine.system}, {machine.cores} cores{memory}")
    if machine.shared_memory is not None:
        what = f"{size_text(machine.shared_memory)} free in /dev/shm"
        fits = machine.shared_memory >= _LEAST_SHM
        uses = "loader workers and NCCL pass data through it, and a process that finds it full dies with a bus error"
        yield judged(
            "shared memory",
            what,
            fits,
            f"{size_text(_LEAST_SHM)}: {uses}",
            "docker run --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm",
            otherwise="warning",
        )
    if machine.open_files is not None:
        what = f"{machine.open_files} per process"
        fits = machine.open_files >= _LEAST_FILES
        yield judged(
            "open files",
            what,
            fits,
            f"{_LEAST_FILES}: connections and the tensors of loader workers each take one",
            "docker run --ulimit nofile=65536, or a hard limit of nofile in /etc/security/limits.conf",
            otherwise="warning",
        )
    for name, free in machine.disks.items():
        level: Level = "warning"
        expected = f"{size_text(_LITTLE_DISK)}: a checkpoint with AdamW's state takes 12 bytes per parameter"
        if free < _LEAST_DISK:
            level = "stop"
            expected = f"at least {size_text(_LEAST_DISK)}: nothing could be saved"
        what = f"{size_text(free)} free for {name}"
        fits = free >= _LITTLE_DISK
        yield judged(
            "disk",
            what,
            fits,
            expected,
            "free some space, or use another folder: --log.dir for runs, HF_HOME and XDG_CACHE_HOME for caches",
            otherwise=level,
        )
    if machine.clock_synchronized is not None:
        yield judged(
            "clock",
            "synchronised"
            if machine.clock_synchronized
            else "not synchronised with a time server",
            machine.clock_synchronized,
            "a synchronised clock: logs of several machines are compared, and tokens expire",
            "start chrony or systemd-timesyncd; a container has its host's clock",
            otherwise="warning",
        )
    for name in _TOKENS:
        yield note("token", f"{name}: {machine.tokens.get(name, 'none')}")
    if machine.tpu is not None:
        yield warning(
            "TPU",
            f"this machine has a TPU ({machine.tpu})",
            "GPUs or CPUs: TPUs are not supported yet",
            "--mesh.device cpu to try things out, or a machine with GPUs",
        )


def _memory() -> int | None:
    """What this process may use: the machine's memory, or less if its container has a limit."""
    sizes = []
    if "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = text_of(Path(path))
        if text is not None and text.isdecimal():
            sizes.append(int(text))
    return min(sizes, default=None)


def _free(folder: Path) -> int:
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _clock_synchronized() -> bool | None:
    """The kernel's view of its clock; None if it cannot be queried."""
    if sys.platform != "linux":
        return None
    import ctypes

    unsynchronized, error = 0x40, 5
    # struct timex; modes = 0 only reads. Five words come before `status`: modes with its padding, then four longs.
    words = (ctypes.c_long * 64)()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(words))
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = ctypes.cast(
        ctypes.byref(words, 5 * ctypes.sizeof(ctypes.c_long)), ctypes.POINTER(ctypes.c_int)
    )[0]
    return state != error and not status & unsynchronized


def _tokens(environ: Mapping[str, str]) -> dict[str, str]:
    """Where each token is, never the token."""
    home = environ.get("HOME", str(Path.home()))
    places = {"HOME": home, "HF_HOME": environ.get("HF_HOME", f"{home}/.cache/huggingface")}
    tokens: dict[str, str] = {}
    for name, (variables, files) in _TOKENS.items():
        for variable in variables:
            if environ.get(variable):
                tokens.setdefault(name, f"set in {variable}")
        for file in files:
            path = Path(file.format(**places))
            if path.is_file() and (path.name != ".netrc" or "wandb" in (text_of(path) or "")):
                tokens.setdefault(name, f"in {path}")
    return tokens


def _tpu(environ: Mapping[str, str]) -> str | None:
    if any(Path("/dev").glob("accel*")):
        return "/dev/accel*"
    return next(
        (
            name
            for name in ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")
            if environ.get(name)
        ),
        None,
    )


def text_of(path: Path) -> str | None:
    """A small file's text; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
