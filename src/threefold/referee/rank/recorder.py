"""The recorder inside a watched process: the arguments of the outermost module in each optimizer step.

It uses torch's global hooks: the call of a module (depth 0, training, with parameters that are trained),
`backward`, the step hook of all optimizers, the DataLoaders. It writes nothing before a process trains, so launchers
and loaders' workers leave no file. Whatever fails here is recorded and ends the recording, never the program; no random
number is drawn and no tensor of the program is changed.
"""

import atexit
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from multiprocessing import util
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import placement
from .loaders import Loaders, PassName
from .rows import Tensors, rows_of_call, tensors_in, token_weights
from .sealed import SealedFile, Values, digest
from .state import state_of
from .weights import StepCurve, architecture_of, norm_of, unwrapped, zero_of

_Action = Callable[..., None] | None


@dataclass
class OpenCall:
    """A call of the outermost module before the optimizer's step."""

    module: Module
    values: Values
    tensors: Tensors = field(default_factory=dict)
    """whole inputs, in the checked steps; what is not an input begins with !."""
    is_trained: bool = False

    def note_gradient(self, gradient: Tensor | None) -> None:
        """A gradient comes back to the output of the call; None: to another one."""
        self.is_trained |= gradient is not None

    def note_loss(self, gradient: Tensor | None) -> None:
        """A gradient comes back to a single value: the loss that the model computes itself."""
        self.note_gradient(gradient)
        self.values["own_loss"] = self.is_trained

    def note_targets(self, logits: Tensor, gradient: Tensor | None) -> None:
        """A gradient comes back to the logits of the call: what they are trained on."""
        if gradient is not None:
            self._trains_on(token_weights(logits, gradient))

    def note_log_probs(self, gradient: Tensor | None) -> None:
        """A gradient comes back to the log-probabilities [rows, tokens - 1] of labels, as SFTTrainer adds them up."""
        if gradient is None:
            return
        labels = self.tensors.get("labels", gradient)[..., 1:]
        # Nothing comes after the last token.
        weights = pad(-gradient.float().cpu(), (0, 1))
        weighted = None
        if labels.shape == gradient.shape:
            weighted = torch.where(weights != 0, pad(labels, (0, 1)), -100), weights
        self._trains_on(weighted)

    def _trains_on(self, weighted: tuple[Tensor, Tensor] | None) -> None:
        """Targets and weights of the outputs. A second time, or for None, they are unknown."""
        self.values["targets"] = weighted is not None and "targets" not in self.values
        if weighted is not None:
            targets, weights = (value.cpu() for value in weighted)
            counted = weights * (targets != -100).sum()
            self.tensors |= {"!targets": targets, "!weights": weights, "!counted": counted}


class RankRecorder:
    """The record of one rank: sealed lines, and the whole inputs of the first `num_whole` steps.

    Args:
        only: the model and the optimizer that are recorded; None: all.
    """

    def __init__(
        self, folder: Path, *, num_whole: int, most_bytes: int, only: Any = None
    ) -> None:
        self._only = only and (unwrapped(only[0]), only[1])
        self._folder, self._num_whole, self._most_bytes = folder, num_whole, most_bytes
        self._file: SealedFile | None = None
        self._name = ""
        self._pid = self._rank = self._start = self._num_steps = 0
        self._trained = WeakKeyDictionary[Optimizer, tuple[int, Module]]()
        self._saved = set[tuple[int, int]]()
        self._passes: set[PassName | None] = {None}
        self._shown = WeakKeyDictionary[Module, Values]()
        self._models = WeakKeyDictionary[Module, int]()
        self._numbers = count()
        self._calls = list[OpenCall]()
        self._curve: StepCurve | None = None
        self._idle_clip: float | None = None
        self._steps_of = Counter[int]()
        self.types: set[str] | None = None
        self._is_off = self._has_loaded = False
        self.loaders = Loaders()

    def guard(self, action: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of `action`; None if it fails: then the program continues unrecorded."""
        # A process that was forked off must not write into the file of its parent; and copying to the host would break
        # a CUDA graph that is being captured.
        is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if self._is_off or is_capturing or (self._pid and self._pid != os.getpid()):
            return None
        try:
            with torch.no_grad():
                return action(*args, **kwargs)
        except Exception as error:
            self._is_off = True
            what = f"{type(error).__name__}: {error}"
            print(
                f"threefold referee: rank {self._rank} is no longer recorded ({what})",
                file=sys.stderr,
            )
            # The disk may be full: a record without its end is not judged.
            with suppress(Exception):
                if self._file is not None:
                    self._file.write("fault", {"what": what})
            return None

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: _Action = None,
        after: _Action = None,
        stops: _Action = None,
    ) -> None:
        """Calls `before`, with the arguments of a function of `owner`, and `after`, with its result too.

        Args:
            stops: in place of `after` where the function raises StopIteration.
        """
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # Traced code must not contain the referee.
            is_watched = not torch.compiler.is_compiling()
            if before is not None and is_watched:
                self.guard(before, *args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except StopIteration:
                if stops is not None:
                    self.guard(stops, *args, **kwargs)
                raise
            if after is not None and is_watched:
                self.guard(after, result, *args, **kwargs)
            return result

        setattr(owner, name, watched)

    def called(self, module: Module, args: tuple[Any, ...], kwargs: Values) -> OpenCall | None:
        """The outermost module is called; None if this is no call with data."""
        is_recorded = any(parameter.requires_grad for parameter in module.parameters()) and (
            not self._only or unwrapped(module) is self._only[0]
        )
        if not is_recorded or (rows := rows_of_call(args, kwargs)) is None:
            return None
        self._file = self._file or self._open()
        shown = self._shown_of(module)
        call = OpenCall(
            module, {**rows.values, "module": shown["module"], "pass": self.loaders.last}
        )
        if self._steps_of[shown["module"]] < self._num_whole:
            call.tensors = {
                name: value.cpu().clone().contiguous() for name, value in rows.tensors.items()
            }
            if shown["architecture"].get("dropout"):
                call.tensors["!random"] = torch.get_rng_state()
            if self._curve is None:
                # Replicas of DistributedDataParallel hold the same, so the first one writes it.
                keeps_copy = (
                    shown.get("how") != "DistributedDataParallel"
                    or shown["data_ranks"][0] == self._rank
                )
                self._curve = StepCurve(
                    module,
                    shown["module"],
                    keeps_copy=keeps_copy,
                    most_bytes=self._file.left_bytes,
                )
            self.types = self._curve.types
        self._calls.append(call)
        return call

    def returned(self, call: OpenCall, output: Any) -> None:
        """The call returns; it is trained on if a gradient comes back to its output. Probes have none."""
        self.types = None
        outputs = {
            name: tensor for name, tensor in tensors_in(output) if tensor.grad_fn is not None
        }
        for tensor in outputs.values():
            tensor.register_hook(call.note_loss if tensor.ndim == 0 else call.note_gradient)
        call.is_trained = not outputs
        logits = outputs.get(
            "logits", next(iter(outputs.values())) if len(outputs) == 1 else None
        )
        if call.tensors and logits is not None and logits.ndim > 1:
            logits.register_hook(partial(self.guard, call.note_targets, logits.detach()))
        # In SFTTrainer, at temperature 1.
        if call.tensors and getattr(output, "is_top1", None) is not None:
            outputs["log_probs"].register_hook(partial(self.guard, call.note_log_probs))

    def _shown_of(self, module: Module) -> Values:
        """What an outermost module shows of its ranks; that of a new one is recorded, with a number for it."""
        assert self._file is not None
        if module not in self._shown:
            number = next(self._numbers)
            self._shown[module] = {
                "module": number,
                "model": self._models.setdefault(unwrapped(module), number),
                "architecture": architecture_of(module),
                "device": next(module.parameters()).device.type,
                **placement.of(module, self.loaders.share),
            }
            self._file.write("placement", self._shown[module])
            if (zero := zero_of(module)) is not None:
                self.around(type(zero), "step", before=self.clips)
                self.around(type(zero), "unscale_and_clip_grads", before=self.zero_steps)
        return self._shown[module]

    def _open(self) -> SealedFile:
        self._rank, world_size = rank_and_world()
        file = None
        while file is None:
            # A rank that was started again, or a second program of the command: to be seen, not mixed.
            self._start += 1
            self._name = f"rank-{self._rank:05d}" + (
                f"-{self._start}" if self._start > 1 else ""
            )
            with suppress(FileExistsError):
                file = SealedFile(
                    self._folder / f"{self._name}.jsonl",
                    most_bytes=self._most_bytes // world_size,
                )
        self._pid = os.getpid()
        start = {"rank": self._rank, "start": self._start, "world_size": world_size}
        file.write("start", start)
        if (models := sys.modules.get("transformers.modeling_utils")) is not None:
            self.around(models.PreTrainedModel, "save_pretrained", after=self.exports)
        atexit.register(self.guard, self.end)
        # A process of multiprocessing ends without atexit.
        util.Finalize(None, self.guard, args=(self.end,), exitpriority=0)
        return file

    def clears(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are set to zero: those of calls before are not in the step."""
        for call in self._calls:
            if call.is_trained:
                call.values["cleared"] = True

    def clips(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are about to be clipped."""
        if (curve := self._trained_curve()) is not None:
            curve.take_gradients()

    def _trained_curve(self) -> StepCurve | None:
        """That of a checked step, once a call of it is trained on."""
        return self._curve if any(call.is_trained for call in self._calls) else None

    def clipped(
        self,
        result: Any,
        parameters: Any,
        max_norm: float,
        total_norm: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Gradients were clipped to a norm; it is read in the checked steps only."""
        if (curve := self._trained_curve()) is not None:
            total = result if total_norm is None else total_norm
            curve.values["clip"] = (
                {"unknown": "gradients are clipped more than once in a step"}
                if curve.values["clip"]
                else {"most": float(max_norm), **norm_of(total)}
            )
        elif math.isfinite(max_norm):
            # Before the backward pass, or after the step: none of the gradients that are trained with.
            self._idle_clip = float(max_norm)

    def clipped_values(self, *args: Any, **kwargs: Any) -> None:
        """Each value was clipped."""
        if self._curve is not None:
            self._curve.values["clip"] = {"unknown": "gradients are clipped by value"}

    def begins_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer begins a step; a closure, as Lightning's, computes its gradients first."""
        closure = [*args, kwargs.get("closure")][1]
        if not callable(closure):
            return self.guard(self.steps, optimizer)

        def watched() -> Any:
            loss = closure()
            self.guard(self.steps, optimizer)
            return loss

        return args[:1] + args[2:], {**kwargs, "closure": watched}

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer takes a step. One that steps right after another has trained on the same calls."""
        calls = [call for call in self._calls if call.is_trained]
        # One before the step of another optimizer was for that.
        idle_clip, self._idle_clip = self._idle_clip, None
        if self._file is None or (self._only and optimizer is not self._only[1]):
            return
        rates = [
            group["lr"]
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), float)
        ]
        if not calls:
            trained = self._trained.get(optimizer)
            # ZeRO steps its optimizer part by part; to save its state, torch takes a step without a learning rate.
            if self._num_steps and any(rates) and not (trained and zero_of(trained[1])):
                self._file.write("unseen" if trained else "joined", {"step": self._num_steps})
            return
        number, _ = self._trained.setdefault(optimizer, (next(self._numbers), calls[0].module))
        self._num_steps += 1
        self._steps_of.update({call.values["module"] for call in calls})
        values: Values = {
            "step": self._num_steps,
            "optimizer": number,
            "calls": [call.values for call in calls],
            "rates": rates,
        }
        if self._start > 1 and self._num_steps == 1:
            values["begins"] = {
                **state_of(calls[0].module, optimizer),
                "loaded": self._has_loaded,
            }
        whole = {
            f"{place}.{name}": value
            for place, call in enumerate(calls)
            for name, value in call.tensors.items()
        }
        if whole:
            values["inputs"] = self._write_whole("inputs", whole)
        if self._curve is not None:
            self._curve.ends(optimizer)
            if idle_clip and not self._curve.values["clip"]:
                self._curve.values["clip"] = {"idle": idle_clip}
            values["curve"] = self._curve.values
            if self._curve.tensors:
                values["curve"] |= self._write_whole("curve", self._curve.tensors)
        self._file.write("step", values)
        used = {call.values["pass"] for call in calls}
        self.loaders.trained_on(used)
        for name in used - self._passes:
            # The rows of a killed rank are known all the same.
            self._file.write("pass", {"pass": name, **self.loaders.passes[name]})
            self._passes.add(name)
        self._calls, self._curve = [], None
        if self._file.left_bytes < 0:
            raise OSError("the record is as large as --keep allows")

    def zero_steps(self, zero: Any, gradients: Any, total_norm: Any) -> None:
        """DeepSpeed's ZeRO is about to step its optimizer, with one part of the parameters after the other."""
        if zero.clip_grad:
            self.clipped(total_norm, None, zero.clip_grad)
        self.steps(zero.optimizer)

    def saves(self, optimizer: Optimizer) -> None:
        """The state of an optimizer is asked for: the training is saved as it is after this step."""
        trained = self._trained.get(optimizer)
        if (
            self._file is None
            or trained is None
            or (self._num_steps, trained[0]) in self._saved
        ):
            return
        self._saved.add((self._num_steps, trained[0]))
        state = state_of(trained[1], optimizer)
        self._file.write("saved", {"step": self._num_steps, **state})

    def loads(self, optimizer: Optimizer, state_dict: Any) -> None:
        """An optimizer gets a state; an empty one is none."""
        self._has_loaded |= bool(state_dict.get("state"))

    def exports(
        self, written: Any, model: Module, save_directory: Any, *args: Any, **kwargs: Any
    ) -> None:
        """A model of transformers was written to a folder."""
        if self._file is None or not self._num_steps:
            return
        number = self._models.get(model)
        values = state_of(model) if number is not None else {}
        values |= {"step": self._num_steps, "module": number}
        self._file.write("exported", {**values, "folder": os.path.abspath(save_directory)})

    def _write_whole(self, kind: str, whole: Tensors) -> dict[str, str]:
        assert self._file is not None
        size = sum(tensor.nbytes for tensor in whole.values())
        if size > self._file.left_bytes:
            return {"left_out": "they exceed --keep"}
        try:
            from safetensors.torch import save
        except ImportError:
            return {"left_out": "safetensors is not installed in the program's Python"}
        name = f"{self._name}-step-{self._num_steps:05d}-{kind}.safetensors"
        content = save(whole)
        (self._folder / name).write_bytes(content)
        self._file.left_bytes -= len(content)
        return {"file": name, "digest": digest(content)}

    def end(self) -> None:
        """Closes the record; nothing is recorded after it."""
        if self._file is None:
            return
        for name, values in self.loaders.passes.items():
            self._file.write("pass", {"pass": name, **values})
        self._file.write("end", {})
        self._file.close()
        self._file, self._is_off = None, True


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of ranks, by the process group or the launcher."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


_recorders: list[RankRecorder] = []


def attach(environ: Mapping[str, str]) -> None:
    """Hangs a recorder on torch, with the settings that `threefold referee` has put into the environment."""
    folder, steps, keep = (
        environ[f"THREEFOLD_REFEREE{setting}"] for setting in ("", "_STEPS", "_KEEP")
    )
    hang(RankRecorder(Path(folder), num_whole=int(steps), most_bytes=int(keep)))


def hang(recorder: RankRecorder) -> None:
    """Hangs a recorder on torch. It stays there when it is closed, and does nothing more."""
    _recorders.append(recorder)
    clip = torch.nn.utils.clip_grad
    _watch_calls(recorder)
    # What clip_grad_norm_ ends with, and what programs call that find the norm themselves (torch 2.6 and newer).
    recorder.around(
        clip, "_clip_grads_with_norm_", before=recorder.clips, after=recorder.clipped
    )
    recorder.around(
        clip, "clip_grad_value_", before=recorder.clips, after=recorder.clipped_values
    )
    torch.nn.utils.clip_grads_with_norm_ = clip._clip_grads_with_norm_
    torch.nn.utils.clip_grad_value_ = clip.clip_grad_value_
    for owner in (Module, Optimizer):
        recorder.around(owner, "zero_grad", before=recorder.clears)
    recorder.around(Optimizer, "state_dict", before=recorder.saves)
    recorder.around(Optimizer, "load_state_dict", before=recorder.loads)
    register_optimizer_step_pre_hook(recorder.begins_step)
    recorder.loaders.attach(recorder.around)


def _watch_calls(recorder: RankRecorder) -> None:
    """Watches the calls of modules that no other module calls."""
    call, local = Module.__call__, threading.local()

    @wraps(call)
    def watched(self: Module, *args: Any, **kwargs: Any) -> Any:
        is_inner = getattr(local, "is_inner", False)
        # In most steps nothing is noted of inner calls, which are many.
        if torch.compiler.is_compiling() or (is_inner and recorder.types is None):
            return call(self, *args, **kwargs)
        open_call = None
        # Activation checkpointing calls inner modules again, from inside of backward.
        is_in_backward = torch._C._current_graph_task_id() != -1
        if not (is_inner or is_in_backward) and self.training and torch.is_grad_enabled():
            open_call = recorder.guard(recorder.called, self, args, kwargs)
        local.is_inner = True
        try:
            output = call(self, *args, **kwargs)
        finally:
            local.is_inner = is_inner
        if (
            recorder.types is not None
            and isinstance(output, Tensor)
            and output.is_floating_point()
        ):
            recorder.types.add(str(output.dtype).removeprefix("torch."))
        if open_call is not None:
            recorder.guard(recorder.returned, open_call, output)
        return output

    Module.__call__ = watched


def watch_sharding(fsdp: Any) -> None:
    """Notes over which ranks `fully_shard` shards: a sharded parameter does not distinguish data ranks from others."""
    for recorder in _recorders:
        recorder.around(fsdp, "fully_shard", after=placement.note_mesh)
        recorder.around(
            fsdp.FullyShardedDataParallel,
            "clip_grad_norm_",
            before=recorder.clips,
            after=recorder.clipped,
        )
