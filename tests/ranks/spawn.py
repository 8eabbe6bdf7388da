"""Real gloo ranks for tests: forked from a server with torch imported, joined through a file, bounded in time."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "torch.distributed.run",
    "threefold.mesh.mesh",
    "threefold.run.rank",
    "threefold.run.start",
    "threefold.commands.main",
    "threefold.integrations.huggingface",
    # What many ranks would import on their own, later than at their start; pytest with each file of tests.
    "encodings.idna",
    "pytest",
    "peft.utils.transformers_weight_conversion",
    "ruamel.yaml",
    "threefold.__main__",
    "threefold.data.text.rows",
    "torch.profiler",
    "torch.utils.serialization",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "deepspeed",  # where it is installed, accelerate imports it in each rank that trains, and it mlflow
    "ranks.frozen",
]
# Read where a library is loaded: one thread (ranks ask for more), no talk of torch's C++, no network, no device.
LOADED_WITH = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
}
TESTS = str(Path(__file__).parents[1])
_OWN = SimpleNamespace(pid=None)  # this process' server


def server() -> Any:
    """The forkserver's multiprocessing context; the server runs, one for each process of pytest."""
    context = multiprocessing.get_context("forkserver")
    its = forkserver._forkserver
    if its._forkserver_pid != _OWN.pid:  # type: ignore[attr-defined]
        its._stop()  # type: ignore[attr-defined]  # a test of loaders may have started one that has imported nothing
    context.set_forkserver_preload(PRELOAD)
    kept = dict(os.environ)
    # The server of some versions of Python does not take the path from here.
    found_in = [TESTS, kept["PYTHONPATH"]] if "PYTHONPATH" in kept else [TESTS]
    os.environ.update(LOADED_WITH, PYTHONPATH=os.pathsep.join(found_in))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    _OWN.pid = its._forkserver_pid  # type: ignore[attr-defined]
    return context


def fork_from_own_server() -> None:
    """Lets what this process forks, a loader's workers say, come from the server that it was forked from itself.

    The server's address and its life line are here; multiprocessing would start another server all the same.
    """
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """Calls `function(*args)` on `num_ranks` gloo ranks and returns their results in rank order.

    Raises:
        AssertionError: a rank raised (its traceback is shown), was ended by a signal, or did not answer in time.
    """
    context = server()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank,
                args=(function, rank, num_ranks, f"file://{folder}/join", args, results),
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, num_ranks, timeout_s)
        except AssertionError as error:
            # The others of a rank that crashes say first that their connections are closed.
            ended = {
                rank: code
                for rank, code in enumerate(_codes(processes))
                if code is not None and code < 0
            }
            if not ended:
                raise
            raise AssertionError(f"ended by a signal: {ended}, by rank; {error}") from None
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _codes(processes: list[Any]) -> list[int | None]:
    for process in processes:
        process.join(1)
    return [process.exitcode for process in processes]


def _collect(results: Any, num_ranks: int, timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < num_ranks:
        try:
            rank, value, error = results.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            missing = sorted(set(range(num_ranks)) - set(answers))
            raise AssertionError(
                f"ranks {missing} did not answer within {timeout_s} s"
            ) from None
        if error is not None:
            raise AssertionError(f"rank {rank} failed:\n{error}")
        answers[rank] = pickle.loads(value)
    return [answers[rank] for rank in range(num_ranks)]


def _rank(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    rendezvous: str,
    args: tuple[Any, ...],
    results: Any,
) -> None:
    import torch
    import torch.distributed as dist

    fork_from_own_server()
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a crash shows where it was
    torch.set_num_threads(1)
    try:
        if num_ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=rendezvous,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=60),
            )
            # A rank that leaves the group at once must not close its connections while another still makes its own.
            dist.barrier()
        value = function(*args)
        # By value: a queue of torch's shares tensors with a process that must still be there when they are read.
        results.put((rank, pickle.dumps(value), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        if dist.is_initialized():
            dist.destroy_process_group()
