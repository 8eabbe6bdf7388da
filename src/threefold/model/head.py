"""From hidden states to the loss, without ever holding all logits.

A causal language model's own forward returns logits [batch, sequence, vocabulary]. Here it is replaced by one that
takes the labels too and returns sums: the head is applied to a chunk of tokens at a time, and a chunk's logits are
computed again in backward. What a model does to its logits after the head (a cap, a scale) is done to each chunk; a
model whose class is not in the table below keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from threefold.model.fused_loss import fused_sums

# (logits [tokens, part of the vocabulary], labels [tokens]) -> (objective, cross entropy), both sums.
Loss: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_CHUNK_BYTES = 256 * 1024**2
# transformers' classes whose logits are the head's product and nothing else; `Llama` is LlamaForCausalLM.
_PLAIN = """
    Afmoe Apertus Arcee AriaText AXK1 AXK2 BailingHybrid Bamba Bart BigBirdPegasus BitNet Blenderbot BlenderbotSmall
    Bloom Camembert CodeGen Cwm Data2VecText Dbrx DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 DiffLlama Doge Dots1
    Dots3Note Emu3 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe FlexOlmo Flint Fuyu Gemma Glm Glm4 Glm4Moe Glm4MoeLite
    GlmMoeDsa GPTBigCode GPTJ GPTNeo GPTNeoX GPTNeoXJapanese GptOss Helium HrmText HunYuanDenseV1 HunYuanMoEV1 HYV3
    Jais2 Jamba JetMoe KimiLinear Kolibri1 Laguna Lfm2 Lfm2Moe Lfm3 Llama Llama4 LongcatFlash Marian MBart Mellum
    MiMoV2Flash MiniMax MiniMaxM2 MiniMaxM3VL Ministral Ministral3 Mistral Mixtral Moshi Mpt Mvp Nemotron Olmo Olmo2
    Olmo3 Olmoe OlmoHybrid OPT Pegasus Persimmon Phi Phi3 Phi4Multimodal Phimoe PLBart Qwen2 Qwen2Moe Qwen3 Qwen3_5
    Qwen3_5Moe Qwen3Moe Qwen3Next Qwen4Exp Roberta RobertaPreLayerNorm SeedOss SmolLM3 SolarOpen StableLm Starcoder2
    XGLM XLMRoberta XLMRobertaXL Xmod Youtu Zamba Zamba2 Zaya
"""
_PLAIN_BY_FULL_NAME = (
    *("BertGenerationDecoder", "CTRLLMHeadModel", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"),
    *("Gemma3ForConditionalGeneration", "GotOcr2ForConditionalGeneration", "ReformerModelWithLMHead"),
    "MossTranscribeDiarizeForConditionalGeneration",
)
# What the others do to the product: logit_scale * x, x / logits_scaling, or cap * tanh(x / cap).
_MULTIPLIED = "Cohere Cohere2 Cohere2Moe CohereCompass"
_DIVIDED = "Granite GraniteSWA GraniteMoe GraniteMoeSWA GraniteMoeHybrid GraniteMoeShared"
_CAPPED = "Gemma2 Gemma3 Gemma3n Gemma4 Gemma4Unified NanoChat VaultGemma"
HEADS = {
    **{f"{name}ForCausalLM": "plain" for name in _PLAIN.split()},
    **dict.fromkeys(_PLAIN_BY_FULL_NAME, "plain"),
    **{f"{name}ForCausalLM": "multiplied" for name in _MULTIPLIED.split()},
    **{f"{name}ForCausalLM": "divided" for name in _DIVIDED.split()},
    **{f"{name}ForCausalLM": "capped" for name in _CAPPED.split()},
}


class Sums(NamedTuple):
    """What a forward with labels returns: sums over this rank's target tokens, and each router's logits (or none)."""

    objective: Tensor
    cross_entropy: Tensor
    router_logits: tuple[Tensor, ...]


def kind_of(model: PreTrainedModel) -> tuple[str | None, str]:
    """How the model makes its logits (`plain`, `multiplied`, `divided`, `capped`; None: not known), and why."""
    cls = type(model)
    kind = HEADS.get(cls.__name__) if cls.__module__.startswith("transformers.") else None
    # A head with layers of its own (roberta's: dense, norm, decoder) is more than the product at its end.
    head = model.get_output_embeddings()
    if (
        kind is None
        or head is None
        or below_head(model) is None
        or all(child is not head for child in model.children())
    ):
        return None, f"the head of {cls.__name__} is not known"
    return kind, "its head is of a known kind"


def below_head(model: PreTrainedModel) -> nn.Module | None:
    """The model below the head; the only one there is where a class does not name it as its prefix says (llama4)."""
    if model.base_model is not model:
        return model.base_model
    found = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return found[0] if len(found) == 1 else None


def first_position(model: nn.Module) -> int:
    """The number of a row's first position; roberta and its like begin after the number of the padding token."""
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(table, nn.Embedding):
            return 0 if table.padding_idx is None else table.padding_idx + 1
    return 0


def chunk_tokens(asked: int | str, *, tokens: int, vocabulary: int) -> int:
    """Tokens whose logits are computed at a time: as asked, or with `auto` as many as 256 MiB of float32 hold."""
    if isinstance(asked, int):
        return asked or tokens
    return min(tokens, max(1, _CHUNK_BYTES // (4 * vocabulary)))


def install(
    model: PreTrainedModel,
    *,
    chunk: int | str,
    whole: Callable[[Tensor], Tensor] = lambda hidden: hidden,
    fused: bool = False,
) -> None:
    """Replaces the model's forward by one that returns `Sums`; before any wrapper is put around the model.

    Args:
        chunk: tokens at a time, `auto`, or 0 for all at once.
        whole: gathers the hidden states of the entire sequence if tp ranks share it.
        fused: head and loss in one kernel (`fused_loss.choose`).
    """
    kind, _ = kind_of(model)
    own_forward, inner, first = model.forward, below_head(model), first_position(model)

    def forward(*, labels: Tensor, token_loss: Loss, output_router_logits: bool = False, **inputs: Any) -> Sums:
        if output_router_logits:
            inputs["output_router_logits"] = True
        if first:
            inputs["position_ids"] = inputs["position_ids"] + first
        outputs = own_forward(**inputs) if kind is None or inner is None else inner(**inputs)
        if kind is None:
            sums = token_loss(outputs.logits.flatten(0, 1), labels.flatten())
        elif fused:
            hidden = whole(outputs.last_hidden_state).flatten(0, 1)
            sums = fused_sums(model, hidden, labels.flatten(), token_loss, kind)
        else:
            sums = _by_chunks(model, whole(outputs.last_hidden_state), labels, token_loss, chunk, kind)
        return Sums(*sums, tuple(getattr(outputs, "router_logits", None) or ()))

    model.forward = forward  # type: ignore[method-assign]


def _by_chunks(
    model: PreTrainedModel, hidden: Tensor, labels: Tensor, token_loss: Loss, asked: int | str, kind: str
) -> tuple[Tensor, Tensor]:
    flat, targets = hidden.flatten(0, 1), labels.flatten()

    def one(states: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        return token_loss(logits_of(model, states, kind), own)

    head: Any = model.get_output_embeddings()
    size = chunk_tokens(asked, tokens=len(flat), vocabulary=head.weight.shape[0])
    if size >= len(flat):
        return one(flat, targets)
    objective = cross_entropy = torch.zeros((), device=flat.device)
    again = partial(checkpoint, one, use_reentrant=False, preserve_rng_state=False)
    for pair in zip(flat.split(size), targets.split(size), strict=True):
        sums = again(*pair) if torch.is_grad_enabled() else one(*pair)
        objective, cross_entropy = objective + sums[0], cross_entropy + sums[1]
    return objective, cross_entropy


def logits_of(model: PreTrainedModel, hidden: Tensor, kind: str) -> Tensor:
    head: Any = model.get_output_embeddings()
    config: Any = model.config
    logits: Tensor = head(hidden)
    if kind == "divided":
        return logits / config.logits_scaling
    if kind == "multiplied":
        return logits * model.logit_scale
    if kind == "capped" and config.final_logit_softcapping is not None:
        return torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits
