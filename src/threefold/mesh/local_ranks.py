"""Starting ranks on this machine, if no launcher did.

Local ranks run under torch's elastic agent, forked from a server process that has already imported the heavy libraries.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from threefold.errors import EXIT_FAILED, EXIT_STOPPED_WITH_CHECKPOINT, EXIT_WRONG_REQUEST

_LEAVES_AFTER_S = 2.0
_LAUNCHER_PIPE = "launcher"
# A restart would not change these: a wrong request, and a requested stop.
_FINAL = (EXIT_WRONG_REQUEST, EXIT_STOPPED_WITH_CHECKPOINT)


def preload(modules: Sequence[str]) -> None:
    """Starts the server that ranks are forked from, importing `modules` in the background.

    OpenMP sizes its thread pool when its library is loaded: one thread here; the ranks ask for more.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A rank that ends makes the others' connections fail; torch's C++ log would cover the reason with theirs.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    multiprocessing.set_forkserver_preload(list(modules))
    from multiprocessing import forkserver

    forkserver.ensure_running()


def start_ranks(
    entry: Callable[..., None], args: Sequence[Any], *, num_ranks: int, grace_s: int = 110, max_restarts: int = 0
) -> int:
    """Runs `entry(*args)` in `num_ranks` local processes with torchrun's variables set; returns the exit code.

    When a rank fails, the others are stopped and all are started again, up to `max_restarts` times. A signal to this
    process is passed on to the ranks, which have `grace_s` seconds to finish their step and save.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    # Its messages are about agents and error files; the failed rank has reported what is wrong.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="threefold-") as folder:
        outcome, launcher = Path(folder) / "exit-code", Path(folder) / _LAUNCHER_PIPE
        os.mkfifo(launcher)
        pipe = os.open(launcher, os.O_RDWR)  # closed by the kernel when this process dies
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"threefold-{os.getpid()}",
            start_method="forkserver",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            shutdown_timeout=grace_s,
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        )
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        try:
            elastic_launch(launch_config, _rank_process)(entry, tuple(args), threads, str(outcome))
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            return failure.exitcode if failure.exitcode > 0 else EXIT_FAILED
        except SignalException as error:
            return int(outcome.read_text()) if outcome.exists() else 128 + error.sigval
        finally:
            os.close(pipe)
    return 0


def _rank_process(entry: Callable[..., None], args: Sequence[Any], threads: int, outcome: str) -> None:
    import torch

    _die_with_launcher(Path(outcome).parent / _LAUNCHER_PIPE)
    final = Path(f"{outcome}-final")
    if final.exists():
        os._exit(int(final.read_text()))
    torch.set_num_threads(threads)
    code = EXIT_FAILED
    try:
        entry(*args)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except BaseException:
        # An entry reports its expected errors itself; this one is unexpected.
        traceback.print_exc()
    if os.environ.get("RANK") == "0":
        Path(outcome).write_text(str(code))
    if code in _FINAL:
        final.write_text(str(code))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    # A rank that returns waits until the agent has every rank's value. After a signal the agent collects none and waits
    # for the rank. The value is in the agent's pipe immediately, so a rank that leaves later loses nothing.
    leave = threading.Timer(_LEAVES_AFTER_S, os._exit, (0,))
    leave.daemon = True
    leave.start()


def _die_with_launcher(pipe: Path) -> None:
    """Kills this rank as soon as no process holds the other end of `pipe`.

    Its parent is the server that it was forked from, which lives as long as any rank does.
    """
    try:
        end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:  # the launcher is gone, and its folder with it
        os._exit(EXIT_FAILED)
    os.set_blocking(end, True)

    def wait() -> None:
        os.read(end, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="launcher pipe", daemon=True).start()


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies, for a rank whose parent is the launcher."""
    if sys.platform != "linux":
        return
    import ctypes

    parent, set_parent_death_signal = os.getppid(), 1
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(EXIT_FAILED)
