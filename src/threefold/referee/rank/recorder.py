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
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from multiprocessing import util
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import placement
from .loaders import Loaders, PassName
from .rows import rows_of_call, tensors_in
from .sealed import SealedFile, digest
from .state import state_of
from .token_weights import token_weights
from .weights import StepCurve, architecture_of, unwrapped


@dataclass
class OpenCall:
    """A call of the outermost module before the optimizer's step."""

    values: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """whole inputs, in the checked steps; what is not an input begins with !."""
    is_trained: bool = False

    def note_gradient(self, gradient: torch.Tensor | None) -> None:
        """A gradient comes back to the output of the call; None: to another one."""
        self.is_trained |= gradient is not None

    def note_loss(self, gradient: torch.Tensor | None) -> None:
        """A gradient comes back to a single value: the loss that the model computes itself."""
        self.note_gradient(gradient)
        self.values["own_loss"] = self.is_trained

    def note_targets(self, logits: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """A gradient comes back to the logits of the call: what they are trained on."""
        if gradient is None:
            return
        known = token_weights(logits, gradient) if "targets" not in self.values else None
        self.values["targets"] = known is not None
        if known is not None:
            self.tensors["!targets"], self.tensors["!weights"] = (value.cpu() for value in known)


class RankRecorder:
    """The record of one rank: sealed lines, and the whole inputs of the first `num_whole` steps."""

    def __init__(self, folder: Path, *, num_whole: int, most_bytes: int) -> None:
        self._folder, self._num_whole, self._most_bytes = folder, num_whole, most_bytes
        self._file: SealedFile | None = None
        self._pid = 0
        self._rank, self._num_steps = 0, 0
        self._name, self._start = "", 0
        self._trained: WeakKeyDictionary[torch.optim.Optimizer, ref[torch.nn.Module]] = WeakKeyDictionary()
        self._saved: set[tuple[int, int]] = set()
        self._passes: set[PassName | None] = set()
        self._has_loaded = False
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._modules: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
        self._numbers = {"optimizer": count(), "module": count()}
        self._calls: list[OpenCall] = []
        self._losses: list[float] = []
        self._curve: StepCurve | None = None
        self._steps_of: Counter[int] = Counter()
        self._shown: dict[int, dict[str, Any]] = {}
        self.types: set[str] | None = None
        self._is_off = False
        self._is_joined = False
        self.loaders = Loaders()

    def guard(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """What `action` returns; None if it fails: then the program continues unrecorded."""
        # A process that was forked off must not write into the file of its parent.
        if self._is_off or (self._pid and self._pid != os.getpid()):
            return None
        try:
            with torch.no_grad():
                return action(*arguments)
        except Exception as error:
            self._is_off = True
            what = f"{type(error).__name__}: {error}"
            print(f"threefold referee: rank {self._rank} is recorded no further ({what})", file=sys.stderr)
            try:
                if self._file is not None:
                    self._file.write("fault", {"what": what})
            except Exception:
                pass  # the disk is full, say: a record without its end is not judged
            return None

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        """The outermost module is called; None if this is no call with data."""
        if not any(parameter.requires_grad for parameter in module.parameters()) or _is_capturing():
            return None
        if (rows := rows_of_call(args, kwargs)) is None:
            return None
        if self._file is None:
            self._open()
        number = self._number_of(module)
        values = {
            "module": number,
            "rows": rows.digests,
            "ignored": rows.ignored,
            "labelled": rows.labelled,
            "pass": self.loaders.last,
        }
        call = OpenCall(values)
        if self._steps_of[number] < self._num_whole:
            call.tensors = {name: tensor.clone().contiguous() for name, tensor in rows.tensors.items()}
            call.tensors |= {f"!shared.{name}": value.cpu().clone().contiguous() for name, value in rows.shared.items()}
            if self._shown[number]["architecture"].get("dropout"):
                call.tensors["!random"] = torch.get_rng_state()
            if self._curve is None:
                self._curve = self._begin_curve(module, number)
            self.types = self._curve.types
        self._calls.append(call)
        return call

    def _begin_curve(self, module: torch.nn.Module, number: int) -> StepCurve:
        assert self._file is not None
        shown = self._shown[number]
        ranks = shown.get("data_ranks", [self._rank])
        # Replicas of DistributedDataParallel hold the same, so the first one writes it.
        keeps_copy = shown.get("how") != "DistributedDataParallel" or ranks[0] == self._rank
        return StepCurve(module, number, keeps_copy=keeps_copy, most_bytes=self._file.left_bytes)

    def returned(self, call: OpenCall, output: Any) -> None:
        """The call returns; it is trained on if a gradient comes back to its output. Probes have none."""
        self.types = None
        outputs = {name: tensor for name, tensor in tensors_in(output) if tensor.grad_fn is not None}
        for tensor in outputs.values():
            tensor.register_hook(call.note_loss if tensor.ndim == 0 else call.note_gradient)
        call.is_trained = not outputs
        logits = outputs.get("logits", next(iter(outputs.values())) if len(outputs) == 1 else None)
        if call.tensors and logits is not None and logits.ndim > 1:
            values = logits.detach()
            logits.register_hook(lambda gradient: self.guard(call.note_targets, values, gradient))

    def _number_of(self, module: torch.nn.Module) -> int:
        """The outermost modules, counted from 0; what a new one shows of its ranks is recorded."""
        assert self._file is not None
        if module not in self._modules:
            number = self._modules[module] = next(self._numbers["module"])
            shown = {"module": number, "class": type(module).__name__, **placement.of(module)}
            shown["architecture"] = architecture_of(module)
            shown["device"] = next(module.parameters()).device.type
            self._shown[number] = shown
            self._file.write("placement", shown)
        return self._modules[module]

    def _open(self) -> None:
        self._rank, world_size = _rank_and_world()
        while self._file is None:
            # A rank that was started again, or a second program of the command: to be seen, not mixed.
            self._start += 1
            self._name = f"rank-{self._rank:05d}" + (f"-{self._start}" if self._start > 1 else "")
            with suppress(FileExistsError):
                path = self._folder / f"{self._name}.jsonl"
                self._file = SealedFile(path, most_bytes=self._most_bytes // world_size)
        self._pid = os.getpid()
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        loaded = ("transformers", "accelerate", "trl", "lightning", "deepspeed")
        versions |= {
            name: str(getattr(sys.modules[name], "__version__", "?")) for name in loaded if name in sys.modules
        }
        start = {"rank": self._rank, "start": self._start, "world_size": world_size, "program": sys.argv[0]}
        self._file.write("start", {**start, "versions": versions})
        atexit.register(self.guard, self._end)
        # A process of multiprocessing ends without atexit.
        util.Finalize(None, self.guard, args=(self._end,), exitpriority=0)

    def backward(self, loss: torch.Tensor) -> None:
        """A loss goes backward; its value is read in the checked steps only, as a device would have to wait for it."""
        if self._curve is not None and loss.numel() == 1 and not _is_capturing():
            self._losses.append(float(loss.detach()))

    def clips(self) -> None:
        """Gradients are about to be clipped."""
        if self._curve is not None and any(call.is_trained for call in self._calls):
            self._curve.take_gradients()

    def clipped(self, norm: torch.Tensor | None, most: float) -> None:
        """Gradients were clipped to a norm, or by value (None); what was found is read in the checked steps only."""
        if self._curve is not None and any(call.is_trained for call in self._calls):
            is_known = self._curve.values["clip"] is None and not hasattr(norm, "placements")
            found = float(norm) if norm is not None and is_known else None
            self._curve.values["clip"] = {"most": float(most), "norm": found, "by_norm": norm is not None}

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer takes a step. One that steps right after another has trained on the same calls."""
        calls = [call for call in self._calls if call.is_trained]
        if self._file is None:
            return
        if not calls:
            if self._num_steps and not self._is_joined:
                self._is_joined = True
                self._file.write("joined", {"step": self._num_steps})
            return
        self._num_steps += 1
        for number in {call.values["module"] for call in calls}:
            self._steps_of[number] += 1
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = next(self._numbers["optimizer"])
        values = {
            "step": self._num_steps,
            "optimizer": self._optimizers[optimizer],
            "calls": [call.values for call in calls],
            "losses": self._losses,
            "rates": [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float)],
        }
        module = next(each for each, number in self._modules.items() if number == calls[0].values["module"])
        self._trained[optimizer] = ref(module)
        if self._start > 1 and self._num_steps == 1:
            values["begins"] = {**state_of(module, optimizer), "loaded": self._has_loaded}
        whole = {f"{place}.{name}": value for place, call in enumerate(calls) for name, value in call.tensors.items()}
        if whole:
            values["inputs"] = self._write_whole("inputs", whole)
        if self._curve is not None:
            self._curve.take_gradients()
            self._curve.take_optimizer(optimizer)
            curve = {**self._curve.values, "types": sorted(self._curve.types)}
            if self._curve.tensors and "unknown" not in curve:
                curve |= self._write_whole("curve", self._curve.tensors)
            values["curve"] = curve
        self._file.write("step", values)
        for name in {call.values["pass"] for call in calls} - self._passes - {None}:
            # Of a rank that is killed, what it reads is known all the same.
            self._file.write("pass", {"pass": name, **self.loaders.passes[name]})
            self._passes.add(name)
        self._calls, self._losses, self._curve = [], [], None
        if self._file.left_bytes < 0:
            raise OSError("the record is as large as --keep allows")

    def saves(self, optimizer: torch.optim.Optimizer) -> None:
        """The state of an optimizer is asked for: the training is saved as it is after this step."""
        module = kept() if (kept := self._trained.get(optimizer)) is not None else None
        if self._file is None or module is None:
            return
        at = self._num_steps, self._optimizers[optimizer]
        if at not in self._saved:
            self._saved.add(at)
            self._file.write("saved", {"step": at[0], "optimizer": at[1], **state_of(module, optimizer)})

    def loads(self, state: Any) -> None:
        """An optimizer is given a state; one that is empty is none."""
        self._has_loaded |= bool(state.get("state"))

    def exports(self, model: torch.nn.Module, folder: str) -> None:
        """A model of transformers was written to a folder."""
        if self._file is None or not self._num_steps:
            return
        number = next((number for each, number in self._modules.items() if unwrapped(each) is model), None)
        values = {"step": self._num_steps, "module": number, "folder": os.path.abspath(folder)}
        self._file.write("exported", {**values, **(state_of(model) if number is not None else {})})

    def _write_whole(self, kind: str, whole: dict[str, torch.Tensor]) -> dict[str, str]:
        assert self._file is not None
        size = sum(tensor.nbytes for tensor in whole.values())
        if size > self._file.left_bytes:
            return {"left_out": "they do not fit into --keep"}
        try:
            from safetensors.torch import save
        except ImportError:
            return {"left_out": "safetensors is not installed in the program's Python"}
        name = f"{self._name}-step-{self._num_steps:05d}-{kind}.safetensors"
        content = save(whole)
        (self._folder / name).write_bytes(content)
        self._file.left_bytes -= len(content)
        return {"file": name, "digest": digest(content)}

    def _end(self) -> None:
        if self._file is None:
            return
        for name, values in self.loaders.passes.items():
            self._file.write("pass", {"pass": name, **values})
        self._file.write("end", {"steps": self._num_steps, "calls_after": sum(call.is_trained for call in self._calls)})
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


_recorders: list[RankRecorder] = []


def attach(environ: Mapping[str, str]) -> None:
    """Hangs a recorder on torch, with the settings that `threefold referee` has put into the environment."""
    recorder = RankRecorder(
        Path(environ["THREEFOLD_REFEREE"]),
        num_whole=int(environ.get("THREEFOLD_REFEREE_STEPS", 3)),
        most_bytes=int(environ.get("THREEFOLD_REFEREE_KEEP", 1 << 30)),
    )
    _recorders.append(recorder)
    call, backward = torch.nn.Module.__call__, torch.Tensor.backward
    local = threading.local()

    @wraps(call)
    def watched_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is traced must not contain the referee
            return call(self, *args, **kwargs)
        depth = getattr(local, "depth", 0)
        open_call = None
        if not depth and self.training and torch.is_grad_enabled() and not _is_in_backward():
            open_call = recorder.guard(recorder.called, self, args, kwargs)
        local.depth = depth + 1
        try:
            output = call(self, *args, **kwargs)
        finally:
            local.depth = depth
        if recorder.types is not None and isinstance(output, torch.Tensor) and output.is_floating_point():
            recorder.types.add(str(output.dtype).removeprefix("torch."))
        if open_call is not None:
            recorder.guard(recorder.returned, open_call, output)
        return output

    @wraps(backward)
    def watched_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            recorder.guard(recorder.backward, self)
        backward(self, *args, **kwargs)

    # What clip_grad_norm_ ends with, and what programs call that find the norm themselves (torch 2.6 and newer).
    clip = torch.nn.utils.clip_grads_with_norm_

    @wraps(clip)
    def watched_clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        recorder.guard(recorder.clips)
        clip(parameters, max_norm, total_norm, *args, **kwargs)
        recorder.guard(recorder.clipped, total_norm, max_norm)

    clip_values = torch.nn.utils.clip_grad_value_

    @wraps(clip_values)
    def watched_clip_values(*args: Any, **kwargs: Any) -> None:
        recorder.guard(recorder.clips)
        clip_values(*args, **kwargs)
        recorder.guard(recorder.clipped, None, 0.0)

    save, load = torch.optim.Optimizer.state_dict, torch.optim.Optimizer.load_state_dict

    @wraps(save)
    def watched_save(self: torch.optim.Optimizer) -> Any:
        recorder.guard(recorder.saves, self)
        return save(self)

    @wraps(load)
    def watched_load(self: torch.optim.Optimizer, state_dict: Any) -> None:
        recorder.guard(recorder.loads, state_dict)
        load(self, state_dict)

    torch.optim.Optimizer.state_dict, torch.optim.Optimizer.load_state_dict = watched_save, watched_load
    torch.nn.utils.clip_grad_value_ = torch.nn.utils.clip_grad.clip_grad_value_ = watched_clip_values
    torch.nn.utils.clip_grads_with_norm_ = torch.nn.utils.clip_grad._clip_grads_with_norm_ = watched_clip
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


def watch_exports(modeling: Any) -> None:
    """Notes what transformers writes by `save_pretrained`, when it is written."""
    write = modeling.PreTrainedModel.save_pretrained

    @wraps(write)
    def watched(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        written = write(self, save_directory, *args, **kwargs)
        for recorder in _recorders:
            recorder.guard(recorder.exports, self, str(save_directory))
        return written

    modeling.PreTrainedModel.save_pretrained = watched
