"""What an estimate is asked about: a mesh, what a rank computes at a time, and what is done to save memory.

Every automatic choice that the run would make is made here as it makes it (`model.data_parallel`, `model.head`,
`model.context_parallel.split`), for a device that need not be there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from threefold.config.schema import Config
from threefold.errors import ConfigError, Problem
from threefold.mesh.shares import batch_problems, head_problems
from threefold.mesh.topology import Topology
from threefold.plan.accelerators import Accelerator
from threefold.plan.decoder import Decoder

# As in `model.data_parallel` and `model.head`.
UNIT_BYTES = 8 * 2**20
KEPT_WHOLE_BYTES, KEPT_WHOLE_PART = 512 * 2**20, 1 / 32
CHUNK_BYTES, CHUNK_BYTES_CUDA = 256 * 2**20, 2**30
ULYSSES_FROM = 2048
# Bytes that an optimizer keeps of a parameter: adamw_8bit has two bytes, and two scales of float32 for 256 of them.
_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256, "sgd": 0.0}


@dataclass(frozen=True)
class Setup:
    """Attributes:
    micro_batch, num_batches: rows of a forward, and forwards of a step, of a dp rank.
    element: bytes of a number in the computation.
    recompute: train.activation_checkpointing.
    moments: bytes that the optimizer keeps of a parameter.
    averages: whether averages of the weights are kept (optimizer.ema).
    documents: whether tokens see their own document alone (data.document_mask).
    exact: gradients are summed as integers of 64 bits (train.reduce).
    device: None: a CPU.
    """

    topology: Topology
    seq_len: int
    micro_batch: int
    num_batches: int = 1
    element: int = 2
    recompute: str = "none"
    cpu_offload: bool = False
    compiled: bool = False
    float8: str = "none"
    moments: float = 8.0
    averages: bool = False
    documents: bool = False
    sequence_parallel: bool = False
    ulysses: bool = False
    loss_chunk: int | None = None
    unsharded: bool = False
    exact: bool = False
    device: Accelerator | None = None

    @property
    def tokens(self) -> int:
        """Of a forward, on this rank."""
        return self.micro_batch * self.seq_len // self.topology.cp

    @property
    def shards(self) -> int:
        return self.topology.dp_shard * self.topology.cp

    @property
    def sharing(self) -> str:
        """`none`, `ddp` or `fsdp`, as `model.data_parallel.choose` has it."""
        topology, plain = self.topology, self.element == 4 and not self.cpu_offload and not self.exact
        if topology.dp == topology.cp == 1:
            return "none" if plain else "fsdp"
        return "ddp" if plain and topology.dp_shard == topology.cp == topology.tp == 1 else "fsdp"

    @property
    def reduced_element(self) -> int:
        """Bytes of a number of the gradients that are sent."""
        return 8 if self.exact else 4

    def chunk(self, decoder: Decoder) -> int:
        """Tokens whose logits exist at one time."""
        if self.loss_chunk is not None:
            return min(self.tokens, self.loss_chunk or self.tokens)
        of_chunk = CHUNK_BYTES if self.device is None else CHUNK_BYTES_CUDA
        return min(self.tokens, max(1, of_chunk // (4 * -(-decoder.vocabulary // self.topology.tp))))

    @property
    def most_kept_bytes(self) -> float:
        """Gathered weights up to this size stay from forward to backward."""
        return KEPT_WHOLE_BYTES if self.device is None else max(
            KEPT_WHOLE_BYTES, KEPT_WHOLE_PART * self.device.memory_bytes
        )  # fmt: skip


def setup_of(config: Config, decoder: Decoder, topology: Topology, device: Accelerator | None) -> Setup:
    """The set-up that a config asks for; `device`: that its ranks have, None: a CPU."""
    train, mesh = config.train, config.mesh
    rows = config.train.global_batch // topology.dp
    size = rows if train.micro_batch == "auto" else train.micro_batch
    heads = math.gcd(*decoder.heads) % (topology.tp * topology.cp) == 0
    evenly = config.data.seq_len % (topology.cp * topology.tp) == 0
    scatter = mesh.sequence_parallel if mesh.sequence_parallel != "auto" else device is not None
    chunk = train.loss_chunk_tokens
    return Setup(
        topology,
        config.data.seq_len,
        micro_batch=size,
        num_batches=max(1, rows // size),
        element=4 if config.model.dtype == "float32" else 2,
        recompute=train.activation_checkpointing,
        cpu_offload=mesh.cpu_offload,
        compiled=device is not None if train.compile == "auto" else train.compile,
        float8=train.float8,
        averages=config.optimizer.ema is not None,
        documents=bool(config.data.document_mask),
        moments=_MOMENTS.get(config.optimizer.name, 8.0) / (2 if config.optimizer.moments == "bfloat16" else 1),
        sequence_parallel=bool(scatter) and evenly and topology.tp > 1,
        ulysses=topology.cp > 1
        and (
            mesh.cp_method == "ulysses" or (mesh.cp_method == "auto" and heads and config.data.seq_len >= ULYSSES_FROM)
        ),
        loss_chunk=None if chunk == "auto" else chunk,
        unsharded=train.accumulate == "unsharded",
        exact=train.reduce == "exact",
        device=device,
    )


def refused(config: Config, decoder: Decoder, topology: Topology) -> list[Problem]:
    """What the mesh cannot divide, and what would be told wrongly; empty if all can be estimated."""
    found = [*decoder.unsure, *batch_problems(config, topology)]
    found += head_problems(topology.tp, *decoder.heads, name=decoder.model_type)
    if topology.tp > 1 and not decoder.family.plan:
        what = f"mesh.tp = {topology.tp} of {decoder.model_type!r} cannot be estimated"
        expected = "a family that tp splits as Llama, or one tp rank"
        found.append(Problem(what, expected, "--mesh.tp 1   (or --trace, of the model's own code)"))
    expected = "a step of next tokens on rows without masks, by an optimizer whose state is known"
    for key, value, plain in (
        ("train.objective", config.train.objective, "next_token"),
        ("data.document_mask", bool(config.data.document_mask) and topology.cp > 1, False),
        ("mesh.ep", config.mesh.ep, 1),
        ("train.fused_loss", config.train.fused_loss == "liger", False),
    ):
        if value != plain:
            found.append(Problem(f"{key} = {str(value).lower()} cannot be estimated", expected, f"leave {key} out"))
    if config.mesh.sequence_parallel == "async":
        what = "mesh.sequence_parallel = async cannot be estimated"
        found.append(Problem(what, expected, "--mesh.sequence_parallel true"))
    if config.optimizer.name not in _MOMENTS or config.optimizer.options:
        what = f"optimizer.name = {config.optimizer.name} cannot be estimated"
        if config.optimizer.options:
            what = "optimizer.options cannot be estimated"
        found.append(Problem(what, expected, "--optimizer.name adamw"))
    if decoder.positions is not None and config.data.seq_len > decoder.positions:
        what = f"data.seq_len = {config.data.seq_len}, but the model supports at most {decoder.positions} positions"
        expected = "rows that are no longer than the model's max_position_embeddings"
        found.append(Problem(what, expected, f"--data.seq_len {decoder.positions}"))
    return found


def checked(config: Config, decoder: Decoder, topology: Topology, device: Accelerator | None) -> Setup:
    """As `setup_of`; ConfigError if it cannot be estimated."""
    if found := refused(config, decoder, topology):
        raise ConfigError.of(found)
    return setup_of(config, decoder, topology, device)
