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

from threefold.model.head import HEADS, chunk_tokens, kind_of

# What a forward may do between the hidden states and the loss for it to be understood.
_HIDDEN = (
    r"\w*outputs\[0\]",
    r"\w*outputs\.last_hidden_state",
    r"slice_logits_to_keep\(hidden_states, logits_to_keep\)",
)
_LOGITS = {
    r"self\.(lm_head|embed_out)\(hidden_states\)(\.contiguous\(\))?": "plain",
    r"logits / self\.config\.logits_scaling": "divided",
    r"logits \* self\.logit_scale": "multiplied",
    r"logits / self\.config\.final_logit_softcapping": "capped",
    r"torch\.tanh\(logits\)": "",
    r"logits \* self\.config\.final_logit_softcapping": "",
}


def _forwards() -> dict[str, str]:
    """Source of the forward of each class in transformers' causal mapping; read, as importing them all takes long."""
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for each in listed for name in ([each] if isinstance(each, str) else each)}
    found = {}
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for text in re.split(r"^(?=class )", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
            name = re.match(r"class (\w+)", text)
            if name is not None and name[1] in names:
                own = re.search(r"^    def forward\(.*?(?=^    (?:def|@)|^\S|\Z)", text, flags=re.MULTILINE | re.DOTALL)
                found[name[1]] = own[0] if own else inspect.getsource(getattr(transformers, name[1]).forward)
    assert found.keys() == names
    return found


def _read(source: str) -> str | None:
    """How a forward makes its logits, as its source says; None where it does anything else."""
    source = re.sub(r"\s+#.*$", "", source, flags=re.MULTILINE)
    assigned = re.findall(r"^\s*(hidden_states|\w*logits) ([-+*/]?=) (.*?),?$", source, flags=re.MULTILINE)
    found: list[str] = []
    for name, sign, value in assigned:
        if name.endswith("router_logits") or (name == "logits" and value in ("logits", "None")):
            continue
        table = dict.fromkeys(_HIDDEN, "") if name == "hidden_states" else _LOGITS
        meanings = [meaning for pattern, meaning in table.items() if re.fullmatch(pattern, value)]
        if sign != "=" or name not in ("hidden_states", "logits") or not meanings:
            return None
        found += [meaning for meaning in meanings if meaning]
    assert len(found) <= 2
    return found[-1] if found[:1] == ["plain"] else None


def test_table_of_heads_is_what_the_forwards_of_transformers_do() -> None:
    """Names each class of this version of transformers that the table lacks, or that has changed."""
    read = {name: _read(source) for name, source in _forwards().items()}
    assert {name: kind for name, kind in read.items() if kind != HEADS.get(name)} == {}


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


@pytest.mark.parametrize("model_type", ["roberta", "camembert", "xlm-roberta", "data2vec-text", "roberta-prelayernorm"])
def test_head_with_layers_of_its_own_keeps_its_forward(model_type: str) -> None:
    assert kind_of(_model(model_type))[0] is None


def test_class_of_somebody_else_is_not_known_by_its_name() -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        """Could do anything to its logits."""

    with torch.device("meta"):
        model = LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1))
    assert kind_of(model)[0] is None


def test_chunks_hold_256_mebibytes() -> None:
    assert chunk_tokens("auto", tokens=4096, vocabulary=257) == 4096
    assert chunk_tokens("auto", tokens=4096, vocabulary=128_256) == 2**28 // (4 * 128_256)
    assert chunk_tokens(100, tokens=4096, vocabulary=257) == 100
    assert chunk_tokens(0, tokens=4096, vocabulary=10**9) == 4096
