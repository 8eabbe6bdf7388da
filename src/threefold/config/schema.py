"""The frozen config tree: every key, its type, its default and what it does.

A config is what the user asked for and is never edited; automatic choices live elsewhere. `loading` makes one from
files and the command line, and reports what is wrong with it in three parts.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from threefold.config.objective import DpoConfig
from threefold.config.observation import AuditConfig, LogConfig
from threefold.config.optimizer import OptimizerConfig
from threefold.config.section import (
    AxisSize,
    Count,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Sources,
    StepRange,
)
from threefold.jsonl import Values


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained instead of the model's weights."""

    r: Count = Field(
        0,
        description="rank of the adapters; above 0, only they are trained; 0: all weights are trained",
    )
    alpha: PositiveFloat | None = Field(
        None, description="scales the adapters' output by alpha / r; default: 2 x r"
    )
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = Field(
        0.0, description="fraction of an adapter's inputs to drop"
    )
    target_modules: (
        Annotated[tuple[str, ...], Field(strict=False)] | Literal["all-linear"] | None
    ) = Field(
        None,
        description="names of the projections that get adapters; default: peft's for the architecture",
    )
    rslora: bool = Field(False, description="scale by alpha / sqrt(r) instead")


class ModelConfig(Section):
    """The model to train. With neither `name_or_path` nor `config`: a Llama of about one million parameters."""

    name_or_path: str | None = Field(
        None, description="Hub id or local folder of a causal language model"
    )
    config: dict[str, Any] | None = Field(
        None, description="config with `model_type`; random weights from train.seed"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="compute dtype, with the same arithmetic on every mesh and weights kept in float32; auto: bfloat16 "
        "on CUDA, float32 on a CPU",
    )
    revision: str | None = Field(None, description="branch, tag or commit on the Hub")
    trust_remote_code: bool = Field(
        False, description="allow code from the model's repository to run"
    )
    init_missing: list[str] = Field(
        [],
        description="patterns of weights that the files may lack; those are drawn from train.seed",
    )
    admission: Literal["auto", "full", "off"] = Field(
        "auto",
        description="probe the architecture on this mesh before training: auto: once, full: at every start, off: never",
    )
    attention: Literal["auto", "sdpa", "flex", "varlen"] = Field(
        "auto",
        description="masks in memory (sdpa), block masks (flex), or document lengths for causal documents and block "
        "masks for the rest (varlen); auto: varlen or flex on CUDA, sdpa on a CPU",
    )
    lora: LoraConfig = LoraConfig()

    @property
    def automatic_rate(self) -> tuple[float, str]:
        """What `optimizer.lr: auto` becomes for these weights, and the reason."""
        if self.lora.r:
            return 2e-4, "adapters are trained"
        if self.name_or_path is not None:
            return 2e-5, "the weights are pretrained"
        return RATE_OF_RANDOM, "the weights are random"


class MixtureSource(Section):
    """One source of a mixture; keys that it omits come from the data section."""

    source: Sources = Field(description="as data.source")
    weight: PositiveFloat = Field(
        description="share of the rows; only the ratio to the other weights counts"
    )
    split: str | None = Field(None, description="split of a Hub dataset")
    config_name: str | None = Field(None, description="configuration of a Hub dataset")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub dataset")
    fields: dict[str, str] | None = Field(
        None, description="the source's own names for columns and keys"
    )


class DataConfig(Section):
    """What to read, and in which order."""

    source: Sources = Field(
        "stdlib",
        description="stdlib, a file, folder or glob, hf:ID, a list of these, or a prepared folder",
    )
    mixture: dict[str, MixtureSource] | None = Field(
        None,
        description="several sources instead of data.source: {name: {source: ..., weight: ...}, ...}",
    )
    split: str = Field("train", description="split of a Hub dataset")
    config_name: str | None = Field(None, description="configuration of a Hub dataset")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub dataset")
    tokenizer: str | None = Field(
        None, description="`bytes`, a Hub id or a folder; default: the model's own, or bytes"
    )
    allow_other_tokenizer: bool = Field(
        False,
        description="allow pretrained weights with a tokenizer other than their own, whose ids mean other tokens",
    )
    seq_len: PositiveInt = Field(256, description="tokens per row")
    format: Literal["auto", "text", "chat", "prompt_completion", "preference"] = Field(
        "auto", description="what the rows are; auto: from their columns"
    )
    fields: dict[str, str] = Field(
        {},
        description="the source's own names for columns and keys: {text: body}, where a.b is b inside a; {messages: "
        "dialog, role: speaker, content: said}",
    )
    train_on: Literal["assistant", "last", "completion", "all"] | None = Field(
        None,
        description="for rows that are not text, the part to train on; default: assistant for chats, else completion",
    )
    lost_texts: Literal["refuse", "count"] = Field(
        "refuse",
        description="texts of a row that the chat template leaves out, such as a system prompt or reasoning: refuse "
        "the row; count: train without them",
    )
    chat_template: str | None = Field(
        None, description="file with a chat template; default: the tokenizer's own"
    )
    template_variables: dict[str, Any] = Field(
        {},
        description="variables for the chat template; {date: 2026-01-31} for one that prints today's date",
    )
    control_tokens: Literal["text", "ids"] = Field(
        "text",
        description="control tokens spelled out in a text: they stay text, or become control tokens (ids)",
    )
    bos: bool | Literal["auto"] = Field(
        "auto",
        description="start each text document with the BOS token; auto: as the tokenizer does for a single text",
    )
    packing: Literal["concat", "best_fit", "none"] | None = Field(
        None,
        description="how documents become rows; default: best_fit for conversations and the like, else concat",
    )
    document_mask: bool | None = Field(
        None,
        description="keep attention and positions within each document; default: on for conversations and the like",
    )
    truncate: bool = Field(
        False,
        description="best_fit, none: cut documents to one row instead of splitting them; those of a pair to half a row",
    )
    group_by_length: bool = Field(
        False,
        description="none: batch rows of similar length, cut to their longest row; within windows of 50 batches",
    )
    skip_bad_lines: bool = Field(
        False,
        description="skip and count what cannot be read, and rows with nothing to train on, instead of refusing them",
    )
    eval_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the documents to hold out of training, chosen by data.seed; evaluated on unless "
        "eval.source is given; 0: none",
    )
    shuffle: bool = Field(True, description="keyed shuffle of the rows, new in every epoch")
    tail: Literal["carry", "drop"] = Field(
        "carry",
        description="rows at an epoch's end that do not fill a global batch; carry: they start the next epoch's first "
        "batch; drop: they are left out; no effect on a mixture, which has no end",
    )
    seed: Count = Field(0, description="seed for the order of rows")
    num_workers: Count = Field(0, description="loader processes per rank")
    skip: Annotated[tuple[StepRange, ...], Field(strict=False)] = Field(
        (),
        description="[first, last] ranges of steps whose batches are skipped; set it when resuming",
    )


class MeshConfig(Section):
    """How ranks are laid out: world size = dp x cp x tp."""

    dp: AxisSize = Field(
        None,
        description="data ranks, each with its own rows; `auto`: the ranks left by the other axes",
    )
    dp_shard: AxisSize = Field(
        None, description="data ranks that split one copy of the weights; 1: DDP, dp: FSDP"
    )
    cp: AxisSize = Field(None, description="ranks that split each sequence")
    tp: AxisSize = Field(None, description="ranks that split each layer")
    ep: PositiveInt = Field(
        1,
        description="tp ranks that divide the experts, each holding whole ones; 1: each holds a part of every expert",
    )
    sequence_parallel: bool | Literal["auto", "async"] = Field(
        "auto",
        description="tp ranks split the sequence between layers; async (auto: on NVLink): overlap sending with matmuls",
    )
    cp_method: Literal["auto", "gather", "ulysses"] = Field(
        "auto", description="how cp ranks exchange data in attention"
    )
    cpu_offload: bool = Field(
        False, description="keep shards, their gradients and moments in host memory"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda if available, else cpu"
    )
    timeout_s: PositiveFloat = Field(600.0, description="longest wait in a collective, s")


class TrainConfig(Section):
    """How long to train, and how much at a time."""

    steps: PositiveInt | None = Field(
        None, description="optimizer steps; default: 120, or what train.epochs gives"
    )
    epochs: PositiveInt | None = Field(
        None, description="passes over the rows, instead of train.steps"
    )
    objective: Literal["next_token", "dpo"] = Field(
        "next_token",
        description="what to minimise: cross entropy, or DPO on pairs of answers (data.format preference)",
    )
    global_batch: PositiveInt = Field(
        16, description="rows per optimizer step over all dp ranks"
    )
    micro_batch: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="rows per dp rank in one forward pass; auto: all of a step, or as many as are estimated to fit",
    )
    reduce: Literal["fast", "exact"] = Field(
        "fast", description="exact: same bits on any mesh.dp ([page](verify.md))"
    )
    memory_check: bool = Field(
        True,
        description="refuse a run estimated not to fit in memory, before it loads anything",
    )
    seed: Count = Field(0, lt=2**63, description="seed for random weights and dropout")
    grad_clip: NonNegativeFloat = Field(
        1.0, description="maximum gradient norm; 0: no clipping"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = Field(
        0.0, description="fraction of the target's probability to spread over the vocabulary"
    )
    z_loss: NonNegativeFloat = Field(
        0.0, description="weight of the squared log-sum-exp of the logits; 0: none"
    )
    loss_chunk_tokens: Count | Literal["auto"] = Field(
        "auto",
        description="tokens whose logits are in memory at once; auto: 256 MiB of logits, 1 GiB on CUDA; 0: all",
    )
    fused_loss: bool | Literal["auto"] = Field(
        "auto",
        description="compute the loss of a chunk's logits and its gradient in Triton kernels; auto: on CUDA",
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="compile each layer; auto: on CUDA"
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        "none",
        description="matmuls of large layers in 8 bits (torchao), with a scale for each tensor or row; CUDA only",
    )
    activation_checkpointing: Literal["none", "full", "selective", "offload"] = Field(
        "none",
        description="recompute layers in backward; selective: all but matmuls and attention; offload: full, with the "
        "layers' inputs kept in host memory",
    )
    deterministic: bool = Field(
        False,
        description="use only algorithms that give the same bits every time; an error where there is none",
    )
    nonfinite: Literal["error", "skip"] = Field(
        "error",
        description="if a step's loss or gradient is not finite, or it trains on no token: end the run, or skip the "
        "update; ten such steps in a row end it",
    )
    timeout_s: PositiveFloat | None = Field(
        None,
        description="longest time without progress, s; default: 0.9 x mesh.timeout_s, none on one rank",
    )

    @property
    def exact(self) -> bool:
        """Whether the bits are to be the same on any mesh.dp."""
        return self.reduce == "exact"


class CheckpointConfig(Section):
    """What to keep, and where to resume from."""

    every: Count = Field(0, description="steps between checkpoints; 0: at the end only")
    keep: PositiveInt = Field(
        2, description="how many of the newest complete checkpoints to keep, besides the best"
    )
    export_every: Count = Field(
        0,
        description="also export every n-th step's checkpoint for transformers, verified, to RUN/exports; 0: none",
    )
    on_error: Literal["error", "continue"] = Field(
        "error", description="if a save fails: end the run, or print the error and continue"
    )
    store: str | None = Field(
        None, description="also copy to an object store, in the background: s3://BUCKET/PREFIX"
    )
    resume: str = Field(
        "auto",
        description="`auto`, `never`, or a checkpoint's path or address in a store",
    )
    grace_s: PositiveInt = Field(
        110, description="time for ranks to finish and save after a stop signal, s"
    )


class EvalConfig(Section):
    """Loss and perplexity on held-out rows, each counted once."""

    source: Sources | None = Field(
        None, description="as data.source; null: what data.eval_share holds out, if anything"
    )
    split: str = Field("validation", description="split of a Hub dataset")
    every: Count = Field(0, description="steps between evaluations; 0: at the end only")
    sample: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="prompts; the model's completions after each evaluation go to samples.jsonl",
    )
    tasks: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="lm-evaluation-harness tasks, by name or .yaml file: [hellaswag, my-task.yaml]",
    )


class Config(Section):
    """Everything that a run is asked to do."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    dpo: DpoConfig = DpoConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    audit: AuditConfig = AuditConfig()

    @property
    def peak_rate(self) -> tuple[float, str]:
        """The peak learning rate as a number, and the reason for it."""
        asked = self.optimizer.lr
        return self.model.automatic_rate if asked == "auto" else (asked, "as given")

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to evaluate on: of eval.source, or those that are held out of the training."""
        return self.eval.source is not None or self.data.eval_share > 0

    @property
    def saves_between(self) -> bool:
        """Whether steps run during a save, which then writes a copy: not if only the last state is saved."""
        return bool(self.checkpoint.every or (self.evaluates and self.eval.every))

    def with_rate(self, lr: float) -> "Config":
        """A copy with `lr` as its peak learning rate."""
        return self.changed(optimizer={"lr": lr})

    def changed(self, **sections: Mapping[str, Any]) -> "Config":
        """A copy with other values in some sections: `config.changed(train={"seed": 1})`; they are not checked."""
        copies = {
            name: getattr(self, name).model_copy(update=values)
            for name, values in sections.items()
        }
        return self.model_copy(update=copies)


def every_key() -> list[str]:
    """Every `section.key`, and `section.key.key` for a section inside a section, in the order of the schema."""
    return [f"{section}.{key}" for section in Config.model_fields for key in keys_of(section)]


def value_at(config: Config, key: str) -> Any:
    """The value under a key of `every_key`."""
    return functools.reduce(getattr, key.split("."), config)


def keys_of(section: str) -> Iterator[str]:
    """The keys of a section, without its name."""
    annotation: Any = Config.model_fields[section].annotation
    inner = inner_sections(section)
    for key in annotation.model_fields:
        yield from (
            (f"{key}.{each}" for each in inner[key].model_fields) if key in inner else (key,)
        )


def inner_sections(section: str) -> Values:
    """The keys of a section that are sections themselves, and their schemas."""
    field = Config.model_fields.get(section)
    fields: Values = getattr(field.annotation, "model_fields", {}) if field is not None else {}
    return {
        key: kind
        for key, entry in fields.items()
        if isinstance(kind := entry.annotation, type) and issubclass(kind, BaseModel)
    }


DEFAULT_STEPS = 120  # without train.steps and train.epochs
RATE_OF_RANDOM = 2e-3  # optimizer.lr: auto, for random weights
# About one million parameters: trained if no model is named. Sizes divide by 2, 4 and 8 ranks.
EMBEDDED_DEFAULT: Values = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
