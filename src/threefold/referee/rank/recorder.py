"""The recorder inside a watched process: what the outermost module is called with in each optimizer step.

It hangs on torch's global hooks: the call of a module (depth 0, training, with parameters that are trained),
`backward`, the step hook of all optimizers, the DataLoaders. It writes nothing before a process trains, so launchers
and loaders' workers leave no file. Whatever fails here is recorded and ends the recording, never the program; no random
number is drawn and no tensor of the program is changed.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import placement
from .loaders import Loaders
from .rows import CallRows, rows_of_call
from .sealed import SealedFile, digest


class RankRecorder:
    """The record of one rank: sealed lines, and the whole inputs of the first `num_whole` steps."""

    def __init__(self, folder: Path, *, num_whole: int, most_bytes: int) -> None:
        self._folder, self._num_whole, self._most_bytes = folder, num_whole, most_bytes
        self._file: SealedFile | None = None
        self._pid = 0
        self._rank, self._num_steps = 0, 0
        self._optimizers: dict[int, int] = {}
        self._calls: list[dict[str, Any]] = []
        self._whole: dict[str, torch.Tensor] = {}
        self._losses: list[float] = []
        self._is_off = False
        self.loaders = Loaders()

    def guard(self, action: Callable[..., None], *arguments: Any) -> None:
        """Calls `action`; if it fails, the program continues unrecorded."""
        # A process that was forked off must not write into the file of its parent.
        if self._is_off or (self._pid and self._pid != os.getpid()):
            return
        try:
            with torch.no_grad():
                action(*arguments)
        except Exception as error:
            self._is_off = True
            what = f"{type(error).__name__}: {error}"
            print(f"threefold referee: rank {self._rank} is recorded no further ({what})", file=sys.stderr)
            try:
                if self._file is not None:
                    self._file.write("fault", {"what": what})
            except Exception:
                pass  # the disk is full, say: a record without its end is not judged

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost module is called."""
        if not any(parameter.requires_grad for parameter in module.parameters()) or _is_capturing():
            return
        if (rows := rows_of_call(args, kwargs)) is None:
            return
        if self._file is None:
            self._open(module)
        call = {
            "module": type(module).__name__,
            "rows": rows.digests,
            "ignored": rows.ignored,
            "labelled": rows.labelled,
            "pass": self.loaders.last,
        }
        if self._num_steps < self._num_whole:
            self._keep_whole(rows)
        self._calls.append(call)

    def _open(self, module: torch.nn.Module) -> None:
        self._rank, world_size = _rank_and_world()
        name = f"rank-{self._rank:05d}"
        try:
            self._file = SealedFile(self._folder / f"{name}.jsonl", most_bytes=self._most_bytes // world_size)
        except FileExistsError:
            # A restarted rank, or a second program of the command: to be seen, not mixed.
            self._file = SealedFile(self._folder / f"{name}.{os.getpid()}.jsonl", most_bytes=self._most_bytes)
        self._pid = os.getpid()
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        loaded = ("transformers", "accelerate", "trl", "lightning", "deepspeed")
        versions |= {
            name: str(getattr(sys.modules[name], "__version__", "?")) for name in loaded if name in sys.modules
        }
        self._file.write("start", {"rank": self._rank, "world_size": world_size, "versions": versions})
        self._file.write("placement", placement.of(module, self._rank))
        atexit.register(self.guard, self._end)
        # A process of multiprocessing ends without atexit.
        util.Finalize(None, self.guard, args=(self._end,), exitpriority=0)

    def _keep_whole(self, rows: CallRows) -> None:
        place = len(self._calls)
        self._whole |= {f"{place}.{name}": tensor.clone().contiguous() for name, tensor in rows.tensors.items()}

    def backward(self, loss: torch.Tensor) -> None:
        """A loss goes backward; its value is read in the checked steps only, as a device would have to wait for it."""
        if self._calls and self._num_steps < self._num_whole and loss.numel() == 1 and not _is_capturing():
            self._losses.append(float(loss.detach()))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer takes a step. One that steps right after another has trained on the same calls."""
        if not self._calls or self._file is None:
            return
        self._num_steps += 1
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        values = {"step": self._num_steps, "optimizer": number, "calls": self._calls, "losses": self._losses}
        if self._whole:
            values["inputs"] = self._write_whole()
        self._file.write("step", values)
        self._calls, self._whole, self._losses = [], {}, []
        if self._file.left_bytes < 0:
            raise OSError("the record is as large as --keep allows")

    def _write_whole(self) -> dict[str, str]:
        assert self._file is not None
        size = sum(tensor.nbytes for tensor in self._whole.values())
        if size > self._file.left_bytes:
            return {"left_out": "they do not fit into --keep"}
        try:
            from safetensors.torch import save
        except ImportError:
            return {"left_out": "safetensors is not installed in the program's Python"}
        name = f"rank-{self._rank:05d}-step-{self._num_steps:05d}.safetensors"
        content = save(self._whole)
        (self._folder / name).write_bytes(content)
        self._file.left_bytes -= len(content)
        return {"file": name, "digest": digest(content)}

    def _end(self) -> None:
        if self._file is None:
            return
        for name, values in self.loaders.passes.items():
            self._file.write("pass", {"pass": name, **values})
        self._file.write("end", {"steps": self._num_steps, "calls_after": len(self._calls)})
        self._file.close()
        self._file, self._is_off = None, True


def _rank_and_world() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _is_capturing() -> bool:
    # Copying to the host would break a CUDA graph that is being captured.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_in_backward() -> bool:
    # Activation checkpointing calls inner modules again, from inside of backward.
    return torch._C._current_graph_task_id() != -1


def attach(environ: Mapping[str, str]) -> None:
    """Hangs a recorder on torch, with the settings that `threefold referee` has put into the environment."""
    recorder = RankRecorder(
        Path(environ["THREEFOLD_REFEREE"]),
        num_whole=int(environ.get("THREEFOLD_REFEREE_STEPS", 3)),
        most_bytes=int(environ.get("THREEFOLD_REFEREE_KEEP", 1 << 30)),
    )
    call, backward = torch.nn.Module.__call__, torch.Tensor.backward
    local = threading.local()

    @wraps(call)
    def watched_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is traced must not contain the referee
            return call(self, *args, **kwargs)
        depth = getattr(local, "depth", 0)
        if not depth and self.training and torch.is_grad_enabled() and not _is_in_backward():
            recorder.guard(recorder.called, self, args, kwargs)
        local.depth = depth + 1
        try:
            return call(self, *args, **kwargs)
        finally:
            local.depth = depth

    @wraps(backward)
    def watched_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            recorder.guard(recorder.backward, self)
        backward(self, *args, **kwargs)

    torch.nn.Module.__call__ = watched_call
    torch.Tensor.backward = watched_backward
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: recorder.guard(recorder.steps, optimizer))
    recorder.loaders.attach(recorder.guard)


def watch_sharding(fsdp: Any) -> None:
    """Notes over which ranks `fully_shard` shards: a sharded parameter does not tell data ranks from others."""
    shard = getattr(fsdp, "fully_shard", None)
    if shard is None:
        return

    @wraps(shard)
    def watched(module: Any, *args: Any, mesh: Any = None, **kwargs: Any) -> Any:
        sharded = shard(module, *args, mesh=mesh, **kwargs)
        placement.note_mesh(mesh)
        return sharded

    fsdp.fully_shard = watched
