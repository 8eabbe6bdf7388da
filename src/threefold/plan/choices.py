"""The meaning of `auto` and of omitted keys: each automatic choice once, with its reason. No torch.

`resolve` makes the choices of a config on a mesh, for devices that need not be there. The model, the run, its checks
and the planner read the same functions, so an estimate cannot assume another choice than the run makes.
"""

import importlib.util
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from threefold.config.schema import Config
from threefold.mesh.topology import Topology

Value = TypeVar("Value")
GIVEN = "as given"

# A collective over less than this is mostly latency: small layers are gathered and reduced together.
UNIT_BYTES = 8 * 2**20
# A model this small is not sharded again between forward and backward: its gather costs more than its memory. On CUDA
# a part of the device's memory, if that is more.
KEPT_WHOLE_BYTES = 512 * 2**20
KEPT_WHOLE_PART = 1 / 32
# Of a chunk's logits in float32. Each chunk reads and writes the whole gradient of the head's weight, which takes as
# long as the products of a chunk of 256 MiB on a GPU.
CHUNK_BYTES = 256 * 2**20
CHUNK_BYTES_CUDA = 2**30
# The sizes of an 8-bit product must be multiples of this.
FLOAT8_MULTIPLE = 16
# Below it all-to-all costs more than it saves (on a CPU, 2 ranks: 0.80 of one process' speed at 512, 0.92 at 2048).
ULYSSES_FROM = 2048


class Decision(NamedTuple, Generic[Value]):
    """A setting as it is in use, and the reason."""

    value: Value
    why: str


class Device(NamedTuple):
    """The properties of a rank's device that choices depend on.

    Attributes:
        kind: `cpu` or `cuda`.
        memory_bytes: of a CUDA device.
        compiler: whether triton, which compiles for CUDA, is installed.
        bfloat16: whether it multiplies in bfloat16 faster than in float32.
    """

    kind: str = "cpu"
    memory_bytes: int = 0
    compiler: bool = True
    bfloat16: bool = True

    @classmethod
    def here(cls, kind: str, memory_bytes: int = 0) -> "Device":
        """One of this process."""
        return cls(kind, memory_bytes, compiler=importlib.util.find_spec("triton") is not None)


@dataclass(frozen=True)
class Resolved:
    """The choices of a config on a mesh.

    Attributes:
        dtype: type of the computation, `float32` or `bfloat16`.
        micro_batch: rows of a dp rank in one forward.
        num_micro_batches: forwards of a dp rank in a step.
        data_parallel: `none`, `ddp` or `fsdp`.
        cp_method: `gather` or `ulysses`.
        attention: `sdpa`, `flex` or `varlen`.
        sequence_parallel: False, True or `async` as asked for, or `possible`: wherever the model's plan allows it.
        compiled: whether layers are compiled.
    """

    dtype: Decision[str]
    micro_batch: Decision[int]
    num_micro_batches: int
    data_parallel: Decision[str]
    cp_method: Decision[str]
    attention: Decision[str]
    sequence_parallel: Decision[bool | str]
    compiled: Decision[bool]


def resolve(
    config: Config,
    topology: Topology,
    device: Device,
    *,
    heads: tuple[int, int] | None = None,
    drops_attention: bool = False,
    unserved: str = "",
) -> Resolved:
    """All choices of a run.

    Args:
        heads: the model's attention heads, and its heads of keys and values; None: not known.
        drops_attention: whether the model drops attention weights in training.
        unserved: what of the model attention by lengths does not compute.
    """
    seq_len = config.data.seq_len
    exact = config.train.exact
    compute = dtype(config, device)
    cast = compute.value != "float32"
    method = cp_method(config.mesh.cp_method, topology, heads=heads, seq_len=seq_len)
    if not cast or not device.bfloat16:
        unserved = "flash computes in bfloat16 alone"
    elif topology.cp > 1 and method.value == "gather":
        unserved = "cp ranks that gather keys have parts of rows"
    return Resolved(
        dtype=compute,
        micro_batch=micro_batch(config, topology),
        num_micro_batches=num_micro_batches(config, topology),
        data_parallel=data_parallel(
            topology, cast=cast, offloaded=config.mesh.cpu_offload, exact=exact
        ),
        cp_method=method,
        attention=attention(
            config.model.attention, device, drops_weights=drops_attention, unserved=unserved
        ),
        sequence_parallel=sequence_parallel(
            config.mesh.sequence_parallel, topology, device, seq_len=seq_len
        ),
        compiled=compiled(config, device),
    )


def dtype(config: Config, device: Device) -> Decision[str]:
    """The type in which a run computes."""
    if config.model.dtype != "auto":
        return Decision(config.model.dtype, GIVEN)
    if device.kind != "cuda":
        return Decision("float32", "a CPU is not faster in bfloat16")
    if not device.bfloat16:
        return Decision("float32", "this device has no products of bfloat16")
    return Decision("bfloat16", "CUDA: its products are many times faster than in float32")


def with_dtype(config: Config, device: Device) -> Config:
    """The config with the type in which it computes on a device."""
    return config.changed(model={"dtype": dtype(config, device).value})


def micro_batch(config: Config, topology: Topology) -> Decision[int]:
    """Rows of a dp rank in one forward; a run takes fewer where all are estimated not to fit (`plan.fit`)."""
    asked = config.train.micro_batch
    if asked != "auto":
        return Decision(asked, GIVEN)
    # An evaluation may have more ranks than the global batch has rows.
    return Decision(max(1, config.train.global_batch // topology.dp), "all rows of a dp rank")


def num_micro_batches(config: Config, topology: Topology) -> int:
    """Forwards of a dp rank in a step."""
    return max(
        1, config.train.global_batch // topology.dp // micro_batch(config, topology).value
    )


def data_parallel(
    topology: Topology, *, cast: bool = False, offloaded: bool = False, exact: bool = False
) -> Decision[str]:
    """Which kind of data parallelism a mesh uses: `none`, `ddp` or `fsdp`.

    Args:
        cast: whether it computes in another type than that of the weights.
        offloaded: whether shards are kept in the host's memory (`mesh.cpu_offload`).
        exact: whether gradients are summed as integers (`train.reduce`).
    """
    one_copy = topology.dp_shard == 1 and topology.cp == 1
    reasons = (
        ("bfloat16", cast),
        ("mesh.cpu_offload", offloaded),
        ("train.reduce exact", exact),
    )
    asked = [what for what, wanted in reasons if wanted]
    if topology.dp == 1 and topology.cp == 1:
        if asked and not working_copy(topology, cast=cast, offloaded=offloaded, exact=exact):
            return Decision(
                "fsdp", f"FSDP2 on a mesh of one, for {' and '.join(asked)}; nothing is sent"
            )
        return Decision("none", "one copy of the model")
    if exact and topology.dp_replicate > 1:
        copies = f"{topology.dp_replicate} copies of {topology.dp_shard} shards"
        return Decision("fsdp", f"{copies}; train.reduce exact sums over copies")
    if one_copy and topology.tp == 1 and not asked:
        return Decision(
            "ddp",
            "dp_shard is 1: torch's DistributedDataParallel, every rank holds a whole model",
        )
    if one_copy:
        why = (
            "tp: FSDP2 replicates what tp has split"
            if topology.tp > 1
            else f"{asked[0]}: FSDP2 replicates it"
        )
        return Decision("fsdp", f"dp_shard is 1, with {why}")
    sharers = topology.dp_shard * topology.cp
    if topology.dp_replicate > 1:
        return Decision(
            "fsdp",
            f"HSDP: {topology.dp_replicate} replicas of {sharers} shards (dp_shard x cp)",
        )
    return Decision("fsdp", f"FSDP2: {sharers} shards (dp_shard x cp)")


def working_copy(
    topology: Topology, *, cast: bool, offloaded: bool = False, exact: bool = False
) -> bool:
    """Whether one process computes with a copy of its weights, kept from step to step; arguments as above.

    FSDP2 on a mesh of one would cast the weights in each micro-batch, twice where they do not stay.
    """
    return cast and topology.world_size == 1 and not (offloaded or exact)


def cp_method(
    asked: str, topology: Topology, *, heads: tuple[int, int] | None, seq_len: int
) -> Decision[str]:
    """How cp ranks exchange data in attention: `gather` or `ulysses`."""
    if asked != "auto":
        return Decision(asked, GIVEN)
    if topology.cp == 1:
        return Decision("gather", "rows are not split")
    if not heads_divide(heads, topology):
        return Decision("gather", "the heads of a tp rank do not divide by cp")
    if seq_len < ULYSSES_FROM:
        return Decision("gather", f"rows shorter than {ULYSSES_FROM} tokens")
    return Decision(
        "ulysses", f"the heads divide by cp, and rows have {ULYSSES_FROM} tokens or more"
    )


def heads_divide(heads: tuple[int, int] | None, topology: Topology) -> bool:
    """Whether each rank of cp x tp can have whole heads, of queries and of keys and values."""
    return heads is not None and all(
        count % (topology.tp * topology.cp) == 0 for count in heads
    )


def attention(
    asked: str, device: Device, *, drops_weights: bool = False, unserved: str = ""
) -> Decision[str]:
    """Masks in memory (`sdpa`), by blocks (`flex`), or causal documents by lengths and others by blocks (`varlen`).

    Args:
        drops_weights: whether the model drops attention weights in training.
        unserved: why attention by lengths cannot be used; empty if it can.
    """
    if asked not in ("auto", "varlen"):
        return Decision(asked, GIVEN)
    if device.kind != "cuda":
        return Decision("sdpa", "flex_attention has no backward on a CPU")
    if not device.compiler:
        return Decision("sdpa", "triton, which compiles flex_attention, is not installed")
    if drops_weights:
        return Decision(
            "sdpa", "the model drops attention weights, which flex_attention cannot do"
        )
    saved = "masks that are not plain causal cost no memory, and what they mask costs no time"
    if unserved:
        return Decision(
            "flex", f"{saved}; documents are not computed by their lengths: {unserved}"
        )
    return Decision(
        "varlen", f"causal documents by their lengths, other masks by blocks: {saved}"
    )


def sequence_parallel(
    asked: bool | str, topology: Topology, device: Device, *, seq_len: int
) -> Decision[bool | str]:
    """Whether tp ranks share the sequence between layers: as asked for, or `possible` if the model's plan allows it."""
    if seq_len % (topology.cp * topology.tp):
        return Decision(False, "the ranks cannot share rows of this length equally")
    if asked != "auto":
        return Decision(asked, GIVEN)
    if device.kind == "cpu":
        return Decision(
            False, "on a CPU, twice as many exchanges take longer than the work that they save"
        )
    return Decision("possible", "on CUDA")


def compiled(config: Config, device: Device) -> Decision[bool]:
    """Whether each layer is compiled."""
    if config.train.compile != "auto":
        return Decision(config.train.compile, GIVEN)
    if config.mesh.ep > 1:
        why = "tokens of whole experts (mesh.ep) are counted on the host, where a graph would break off"
        return Decision(False, why)
    if device.kind != "cuda":
        return Decision(False, f"on a {device.kind} it takes longer than a short run gains")
    if not device.compiler:
        return Decision(False, "triton, which compiles for CUDA, is not installed")
    return Decision(True, "on CUDA, one layer at a time")


def fused_loss(asked: bool | str, device: Device) -> Decision[bool]:
    """Whether the loss of a chunk's logits, and its gradient, are computed by kernels of Triton."""
    if asked != "auto":
        return Decision(bool(asked), GIVEN)
    if device.kind != "cuda" or not device.compiler:
        return Decision(False, "its kernels are for CUDA, and need triton")
    return Decision(True, "on CUDA: logits are read twice and their gradient written once")


def pays(recipe: str, outputs: int, inputs: int) -> bool:
    """Whether a layer's products are faster in 8 bits: by torchao's measurements of its recipes on H100."""
    if outputs % FLOAT8_MULTIPLE or inputs % FLOAT8_MULTIPLE:
        return False
    if recipe == "tensorwise":
        return outputs > 1024 or inputs > 4096
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)


def kept_whole(gathered_bytes: float, device: Device, *, offloaded: bool) -> Decision[bool]:
    """Whether gathered weights of this size stay from forward to backward."""
    if offloaded:
        return Decision(False, "shards are in the host's memory")
    most = KEPT_WHOLE_BYTES
    if device.kind == "cuda":
        most = max(most, int(KEPT_WHOLE_PART * device.memory_bytes))
    if gathered_bytes <= most:
        return Decision(True, f"up to {most / 2**20:,.0f} MiB stay from forward to backward")
    return Decision(False, f"more than {most / 2**20:,.0f} MiB do not stay")


def chunk_tokens(asked: int | str, *, tokens: int, vocabulary: int, device: str) -> int:
    """Tokens of a forward whose logits exist at one time; 0 asks for all.

    Args:
        vocabulary: entries of the largest part that a tp rank has of it.
    """
    if asked == "auto":
        chunk_bytes = CHUNK_BYTES_CUDA if device == "cuda" else CHUNK_BYTES
        return min(tokens, max(1, chunk_bytes // (4 * vocabulary)))
    return min(tokens, int(asked) or tokens)
