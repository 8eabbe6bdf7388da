"""One step of a set-up traced on one CPU: what a rank holds at its peak, and what it sends, without the ranks.

The real model is split over a process group that sends nothing, and one step of the real training code runs on tensors
that have a shape but no storage. So memory and collectives are those of the code, for any number of ranks, in seconds.
They are a CPU's: kernels of a device may keep other tensors, and compiled layers keep fewer. Rounding by an
allocator and memory used by the driver are not included.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from threefold.config.schema import Config
from threefold.errors import ConfigError, Problem, first_line
from threefold.mesh.environment import LaunchInfo
from threefold.mesh.mesh import Mesh, join_mesh
from threefold.mesh.topology import Topology
from threefold.model import weight_loading
from threefold.model.build import arranged
from threefold.model.collectives import local_part
from threefold.optim.build import build_optimizer
from threefold.plan import choices
from threefold.plan.live_tensors import LiveTensors
from threefold.run.assemble import average_of
from threefold.training.forward import token_loss_of
from threefold.training.step import TrainStep

# The interpreter and libraries of a rank's process on a CPU, and of one without ranks: measured (docs/plan.md), of
# torch's builds for CPUs and for CUDA.
_HOST_BYTES = (370 * 2**20, 440 * 2**20), (525 * 2**20, 815 * 2**20)
# Changes nothing that is traced.
_RATE = 1e-4
_FINITE = torch.ones(())
Sent: TypeAlias = dict[tuple[str, str], tuple[int, int]]
_AXES = ("tp", "cp", "fsdp", "dp_replicate", "dp", "loss", "world")


@dataclass(frozen=True)
class Traced:
    """Figures of the first rank, in a step after the first.

    Attributes:
        peak_bytes: at the moment when it holds the most.
        parameters_bytes, optimizer_bytes: of its own part; held at every moment.
        gradients_bytes: of its own part, once they are complete.
        resident_bytes: of its process, if it is on a CPU: also gloo's copies, what glibc keeps, and `host_bytes`.
        host_bytes: the part of it for interpreter and libraries.
        sent: (axis, collective) -> (calls, bytes of the tensors that the ranks of that axis make or share).
    """

    peak_bytes: int
    parameters_bytes: int
    optimizer_bytes: int
    gradients_bytes: int
    resident_bytes: int
    host_bytes: int
    sent: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


def refused(config: Config) -> Iterator[Problem]:
    """Settings that cannot be traced, as results would be wrong; empty if all can."""
    expected = "tensors on the device: the trace models one memory"
    if config.mesh.cpu_offload:
        yield Problem(
            "mesh.cpu_offload = true cannot be traced",
            expected,
            "leave mesh.cpu_offload out",
        )
    if config.train.activation_checkpointing == "offload":
        yield Problem(
            "train.activation_checkpointing = offload cannot be traced",
            expected,
            "--train.activation_checkpointing full   (which holds one more layer input per layer)",
        )
    eager = "what is computed as it is written, and needs no values: weights, layers and products as they are"
    by_values = config.optimizer.name in ("adafactor", "adamw_8bit", "muon")
    for key, value, plain in (
        ("train.objective", config.train.objective, "next_token"),
        ("train.reduce", config.train.reduce, "fast"),
        ("train.float8", config.train.float8, "none"),
        ("train.compile", config.train.compile, False),
        ("mesh.ep", config.mesh.ep, 1),
        ("optimizer.name", config.optimizer.name if by_values else "adamw", "adamw"),
    ):
        if value not in (plain, "auto"):
            shown = str(value).lower()
            yield Problem(f"{key} = {shown} cannot be traced", eager, f"leave {key} out")


def trace(config: Config, architecture: PretrainedConfig, topology: Topology) -> Traced:
    """Traces one step of the first rank, with as many micro-batches as a step has.

    Raises:
        ConfigError: this process has a process group already, or torch cannot trace the model.
    """
    if dist.is_initialized():
        raise ConfigError(
            "tracing in a process that is a rank",
            expected="a separate process: a group that sends nothing replaces the ranks",
            fix="threefold plan, by itself",
        )
    dist.init_process_group(
        "fake", rank=0, world_size=topology.world_size, store=dist.HashStore()
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # It reports a failure once more.
            logging.getLogger("torch._subclasses").setLevel(logging.CRITICAL)
            mesh = join_mesh(
                topology, LaunchInfo(0, topology.world_size), device="cpu", timeout_s=60
            )
            return _traced(config, architecture, mesh)
    except RuntimeError as error:
        name = config.model.name_or_path or (config.model.config or {}).get(
            "model_type", "the model"
        )
        reason = first_line(error)
        raise ConfigError(
            f"{name!r} cannot be traced: {reason}",
            expected="operators with output shapes that need no values, in these dtypes",
            fix="--model.dtype bfloat16"
            if "BF16" in reason
            else "train one step, and read peak_memory_bytes",
        ) from error
    finally:
        dist.destroy_process_group()


def _traced(config: Config, architecture: PretrainedConfig, mesh: Mesh) -> Traced:
    model, _ = arranged(config, architecture, mesh)
    replicated = ("data parallelism: ddp", model.choices[0][1]) in model.choices
    seq_len = config.data.seq_len
    micro_batch = choices.micro_batch(config, mesh.topology).value
    num_batches = choices.num_micro_batches(config, mesh.topology)
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight_loading.reserve(model.module, mesh, offloaded=config.mesh.cpu_offload)
        model.module.train()
        optimizer = build_optimizer(model.module, config.optimizer, working=model.working)
        smoothing, z_loss = config.train.label_smoothing, config.train.z_loss
        token_loss = token_loss_of(model, label_smoothing=smoothing, z_loss=z_loss)
        ema = average_of(config, model)
        step = _TracedStep(
            model,
            optimizer,
            grad_clip=config.train.grad_clip,
            token_loss=token_loss,
            ema=ema,
            compare_copies=False,  # there are no values
        )
        ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64)
        batch = {
            "input_ids": ids,
            "labels": ids.clone(),
            "position_ids": torch.arange(seq_len).expand_as(ids),
        }
        if config.data.document_mask:
            batch["document_ids"] = torch.zeros_like(ids)
        with SentBytes(mesh) as of_one:
            step.run([batch], lr=_RATE)  # makes the optimizer's state
        parameters = [*model.module.parameters(), *model.module.buffers()]
        averages = [*ema.state().values()] if ema is not None else []
        moments = [
            each
            for each in tree_leaves([*optimizer.state.values()])
            if isinstance(each, Tensor)
        ] + averages
        trained = [each for each in parameters if each.requires_grad]
        # After the second of several micro-batches, each holds and sends what the one before did. DDP has all gradients
        # in buckets before its first backward, as there are those of one before the second here.
        batches = 2 if replicated else min(num_batches, 2)
        with (
            LiveTensors([*parameters, *moments], trained * replicated) as memory,
            SentBytes(mesh) as sent,
        ):
            step.run([batch] * batches, lr=_RATE)
        held, state, gradients = (
            sum(local_part(each).nbytes for each in tensors)
            for tensors in (parameters, moments, trained)
        )
    traffic = _repeated(of_one.found, sent.found, num_batches)
    # DDP sums the gradients of the micro-batches before the last outside its buckets.
    sums = gradients * (replicated and num_batches > 1)
    host = _HOST_BYTES[torch.version.cuda is not None][mesh.topology.world_size == 1]
    resident = (
        host + round(memory.resident_bytes) + sums + (held + state) * config.saves_between
    )
    if replicated:
        traffic["dp", "all-reduce"] = (1, gradients)
    return Traced(memory.peak + sums, held, state, gradients, resident, host, traffic)


class _TracedStep(TrainStep):
    def _update(self, grad_norm: Tensor, lr: float | None) -> None:
        # Some optimizers wait for the norm, which has no value here: finite.
        grad_norm.constant = _FINITE  # type: ignore[attr-defined]
        super()._update(grad_norm, lr)


def _repeated(one: Sent, two: Sent, times: int) -> Sent:
    """The communication of `times` micro-batches, given that of one and two."""
    traffic = {}
    for key, (calls, size) in two.items():
        first_calls, first_size = one.get(key, (0, 0))
        rest = times - 2
        traffic[key] = (calls + rest * (calls - first_calls), size + rest * (size - first_size))
    return traffic


class SentBytes(TorchDispatchMode):
    """Counts what collectives send, by the axis whose ranks take part."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.found: Sent = {}
        groups = {axis: mesh.group(axis) for axis in reversed(_AXES)}
        self._axis_of = {
            group.group_name: axis for axis, group in groups.items() if group is not None
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._opname
            # The whole tensor of an all-gather or a reduce-scatter; of others, what a rank contributes.
            counted = max(each.nbytes for each in tree_leaves(args) if isinstance(each, Tensor))
            group = next(
                dist.ProcessGroup.unbox(each)
                for each in tree_leaves(args)
                if isinstance(each, torch.ScriptObject)
            )
            key = (
                self._axis_of.get(group.group_name, "other"),
                _WORDS.get(name, name.strip("_")),
            )
            calls, sent = self.found.get(key, (0, 0))
            self.found[key] = (calls + 1, sent + counted)
        return func(*args, **(kwargs or {}))


_WORDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}
