"""Which forwards are understood, and how many tokens' logits exist at a time."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from threefold.model.head import kind_of, read_kind
from threefold.plan.choices import chunk_tokens

# Classes of transformers that were read: their logits are the head's product alone; `Llama` is LlamaForCausalLM.
_PLAIN = """
    Afmoe Apertus Apertus1p5Text Arcee AriaText AXK1 AXK2 BailingHybrid Bamba Bart BigBirdPegasus BitNet Blenderbot
    BlenderbotSmall Bloom Camembert CodeGen Cwm Data2VecText Dbrx DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4
    DiffLlama Doge Dots1 Dots3Note Dory Emu3 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe FlexOlmo Flint Fuyu Gemma Glm
    Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GPTBigCode GPTJ GPTNeo GPTNeoX GPTNeoXJapanese GptOss Helium HrmText
    HunYuanDenseV1 HunYuanMoEV1 HYV3 Jais2 Jamba JetMoe KimiLinear Kolibri1 Laguna LaraMini Lfm2 Lfm2Moe Lfm3 Llama
    Llama4 LongcatFlash Marian MBart Mellum MiMoV2Flash MiniMax MiniMaxM2 MiniMaxM3VL Ministral Ministral3 Mistral
    Mixtral Moshi Mpt Mvp Nemotron Olmo Olmo2 Olmo3 Olmoe OlmoHybrid OPT Pegasus Persimmon Phi Phi3 Phi4Multimodal
    Phimoe PLBart Qwen2 Qwen2Moe Qwen3 Qwen3_5 Qwen3_5Moe Qwen3Moe Qwen3Next Qwen4Exp Roberta RobertaPreLayerNorm
    SeedOss SmolLM3 SolarOpen StableLm Starcoder2 XGLM XLMRoberta XLMRobertaXL Xmod Youtu Zamba Zamba2 Zaya
"""
_PLAIN_BY_FULL_NAME = (
    *("BertGenerationDecoder", "CTRLLMHeadModel", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"),
    *(
        "Gemma3ForConditionalGeneration",
        "GotOcr2ForConditionalGeneration",
        "ReformerModelWithLMHead",
    ),
    "MossTranscribeDiarizeForConditionalGeneration",
)
# What the others do to the product.
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


def _forwards() -> dict[str, str]:
    """Source of the forward of each class in transformers' causal mapping; read, as importing them all takes long."""
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for each in listed for name in ([each] if isinstance(each, str) else each)}
    found = {}
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for text in re.split(
            r"^(?=class )", file.read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            name = re.match(r"class (\w+)", text)
            if name is not None and name[1] in names:
                own = re.search(
                    r"^    def forward\(.*?(?=^    (?:def|@)|^\S|\Z)",
                    text,
                    flags=re.MULTILINE | re.DOTALL,
                )
                found[name[1]] = (
                    own[0] if own else inspect.getsource(getattr(transformers, name[1]).forward)
                )
    assert found.keys() == names
    return found


def test_forwards_of_transformers_are_read_as_a_person_reads_them() -> None:
    """Names each class of this version of transformers that nobody has read, or that has changed."""
    found = {name: read_kind(source) for name, source in _forwards().items()}
    assert {name: kind for name, kind in found.items() if kind != HEADS.get(name)} == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "logits = self.lm_head(hidden_states)",
            "logits = self.lm_head(hidden_states) + self.bias",
        ),
        (
            "logits = self.lm_head(hidden_states)",
            "logits = self.lm_head(self.norm(hidden_states))",
        ),
        ("outputs.last_hidden_state", "outputs.last_hidden_state * 2"),
        ("loss = None", "logits *= 2"),
        (
            "loss = None",
            "logits = logits / self.config.logits_scaling\n    logits = logits * self.logit_scale",
        ),
    ],
)
def test_a_forward_that_does_more_is_not_understood(before: str, after: str) -> None:
    source = (
        "def forward(self):\n    hidden_states = outputs.last_hidden_state\n"
        "    logits = self.lm_head(hidden_states)\n    loss = None\n"
    )
    assert read_kind(source) == "plain" and before in source
    assert read_kind(source.replace(before, after)) is None


def test_states_are_cut_where_they_are_taken_from_the_outputs() -> None:
    source = (
        "def forward(self):\n"
        "    hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)\n"
        "    logits = self.lm_head(hidden_states)\n"
    )
    assert read_kind(source) == "plain"
    assert read_kind(source.replace("last_hidden_state,", "last_hidden_state * 2,")) is None


def _model(model_type: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", "plain"),
        ("gpt2", "plain"),
        ("gpt_neox", "plain"),
        ("mixtral", "plain"),
        ("gemma2", "capped"),
        ("granite", "divided"),
        ("cohere", "multiplied"),
    ],
)
def test_known_heads_are_understood(model_type: str, expected: str) -> None:
    assert kind_of(_model(model_type))[0] == expected


def test_unknown_head_keeps_its_own_forward() -> None:
    assert kind_of(_model("falcon")) == (None, "the head of FalconForCausalLM is not known")


@pytest.mark.parametrize(
    "model_type",
    ["roberta", "camembert", "xlm-roberta", "data2vec-text", "roberta-prelayernorm"],
)
def test_head_with_layers_of_its_own_keeps_its_forward(model_type: str) -> None:
    assert kind_of(_model(model_type))[0] is None


def test_class_of_somebody_else_is_not_known_by_its_name() -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        """Could do anything to its logits."""

    with torch.device("meta"):
        model = LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1))
    assert kind_of(model)[0] is None


def test_chunks_hold_256_mebibytes() -> None:
    assert chunk_tokens("auto", tokens=4096, vocabulary=257, device="cpu") == 4096
    assert chunk_tokens("auto", tokens=4096, vocabulary=128_256, device="cpu") == 2**28 // (
        4 * 128_256
    )
    assert chunk_tokens("auto", tokens=4096, vocabulary=128_256, device="cuda") == 2**30 // (
        4 * 128_256
    )
    assert chunk_tokens(100, tokens=4096, vocabulary=257, device="cpu") == 100
    assert chunk_tokens(0, tokens=4096, vocabulary=10**9, device="cpu") == 4096
