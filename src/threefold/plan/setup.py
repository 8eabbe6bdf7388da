"""The subject of an estimate: a mesh, the work of a rank at a time, and memory-saving settings.

Automatic choices are those of `choices`, for a device that need not be there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from threefold.config.optimizer import OPTIMIZERS
from threefold.config.schema import Config
from threefold.errors import ConfigError, Problem
from threefold.mesh.divisibility import batch_problems, head_problems
from threefold.mesh.topology import Topology
from threefold.plan import choices
from threefold.plan.accelerators import Accelerator
from threefold.plan.decoder import Decoder


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
    fused_loss: bool = False
    float8: str = "none"
    moments: float = 8.0
    averages: bool = False
    documents: bool = False
    sequence_parallel: bool = False
    ulysses: bool = False
    loss_chunk: int | str = "auto"
    exact: bool = False
    device: Accelerator | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a forward, on this rank."""
        return self.micro_batch * self.seq_len // self.topology.cp

    @property
    def stream(self) -> int:
        """Tokens of the hidden states between layers, which sequence parallelism splits."""
        return self.tokens // (self.topology.tp if self.sequence_parallel else 1)

    @property
    def shards(self) -> int:
        return self.topology.dp_shard * self.topology.cp

    @property
    def sharing(self) -> str:
        """`none`, `ddp` or `fsdp`."""
        cast = self.element != 4
        return choices.data_parallel(
            self.topology, cast=cast, offloaded=self.cpu_offload, exact=self.exact
        ).value

    @property
    def gathers_8_bits(self) -> bool:
        """Whether FSDP2 gathers the weights of converted layers in 8 bits."""
        return self.float8 == "tensorwise" and self.shards > 1 and not self.cpu_offload

    @property
    def working_copy(self) -> bool:
        """Whether it computes with a copy of its weights."""
        cast = self.element != 4
        return choices.working_copy(
            self.topology, cast=cast, offloaded=self.cpu_offload, exact=self.exact
        )

    @property
    def gradient_element(self) -> int:
        """Bytes of a number of the gradients when the last backward is done."""
        return self.element if self.working_copy and self.num_batches == 1 else 4

    @property
    def reduced_element(self) -> int:
        """Bytes of a number of the gradients that are sent."""
        return 8 if self.exact else 4

    def chunk(self, decoder: Decoder) -> int:
        """Tokens whose logits exist at one time."""
        part = -(-decoder.vocabulary // self.topology.tp)
        kind = kind_of(self.device).kind
        return choices.chunk_tokens(
            self.loss_chunk, tokens=self.tokens, vocabulary=part, device=kind
        )


def kind_of(device: Accelerator | None) -> choices.Device:
    """What choices depend on of a device that need not be there; None: a CPU."""
    return choices.Device() if device is None else choices.Device("cuda", device.memory_bytes)


def setup_of(
    config: Config, decoder: Decoder | None, topology: Topology, device: Accelerator | None
) -> Setup:
    """The set-up that a config asks for.

    Args:
        decoder: the model; None: not known.
        device: that its ranks have; None: a CPU.
    """
    train = config.train
    optimizer = OPTIMIZERS.get(config.optimizer.name, OPTIMIZERS["adamw"])
    # AdamW's where they are not known.
    moments = 8.0 if optimizer.moment_bytes is None else optimizer.moment_bytes
    heads = decoder.heads if decoder is not None else None
    resolved = choices.resolve(config, topology, kind_of(device), heads=heads)
    return Setup(
        topology,
        config.data.seq_len,
        micro_batch=resolved.micro_batch.value,
        num_batches=resolved.num_micro_batches,
        element=4 if resolved.dtype.value == "float32" else 2,
        recompute=train.activation_checkpointing,
        cpu_offload=config.mesh.cpu_offload,
        compiled=resolved.compiled.value,
        fused_loss=choices.fused_loss(train.fused_loss, kind_of(device)).value,
        float8=train.float8,
        averages=config.optimizer.ema is not None,
        documents=bool(config.data.document_mask),
        moments=moments / (2 if config.optimizer.moments == "bfloat16" else 1),
        sequence_parallel=bool(resolved.sequence_parallel.value) and topology.tp > 1,
        ulysses=topology.cp > 1 and resolved.cp_method.value == "ulysses",
        loss_chunk=train.loss_chunk_tokens,
        exact=train.exact,
        device=device,
    )


def refused(config: Config, decoder: Decoder, topology: Topology) -> Iterator[Problem]:
    """Sizes that the mesh cannot divide, and settings that cannot be estimated; empty if all can be."""
    yield from decoder.unsure
    yield from batch_problems(config, topology)
    yield from head_problems(topology.tp, *decoder.heads, name=decoder.model_type)
    if topology.tp > 1 and not decoder.family.plan:
        expected = "a family that tp splits like Llama, or one tp rank"
        yield Problem(
            f"mesh.tp = {topology.tp} of {decoder.model_type!r} cannot be estimated",
            expected,
            "--mesh.tp 1   (or without --gpus: traced, of the model's own code)",
        )
    expected = (
        "a step of next tokens on rows without masks, by an optimizer whose state is known"
    )
    for key, value, plain in (
        ("train.objective", config.train.objective, "next_token"),
        ("data.document_mask", bool(config.data.document_mask) and topology.cp > 1, False),
        ("mesh.ep", config.mesh.ep, 1),
    ):
        if value != plain:
            yield Problem(
                f"{key} = {str(value).lower()} cannot be estimated",
                expected,
                f"leave {key} out",
            )
    if config.mesh.sequence_parallel == "async":
        what = "mesh.sequence_parallel = async cannot be estimated"
        yield Problem(what, expected, "--mesh.sequence_parallel true")
    named = OPTIMIZERS.get(config.optimizer.name)
    if named is None or named.moment_bytes is None or config.optimizer.options:
        what = f"optimizer.name = {config.optimizer.name} cannot be estimated"
        if config.optimizer.options:
            what = "optimizer.options cannot be estimated"
        yield Problem(what, expected, "--optimizer.name adamw")
    if decoder.positions is not None and config.data.seq_len > decoder.positions:
        what = f"data.seq_len = {config.data.seq_len}, but the model supports at most {decoder.positions} positions"
        expected = "rows that are no longer than the model's max_position_embeddings"
        yield Problem(what, expected, f"--data.seq_len {decoder.positions}")


def checked(
    config: Config, decoder: Decoder, topology: Topology, device: Accelerator | None
) -> Setup:
    """As `setup_of`; ConfigError if it cannot be estimated."""
    ConfigError.raise_for(refused(config, decoder, topology))
    return setup_of(config, decoder, topology, device)
