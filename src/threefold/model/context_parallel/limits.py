"""Limits of an architecture, read from its modules: before anything is computed, and before the first collective.

The model has no storage yet. Anything that is not refused is corrected where it is computed (`attention`,
`recurrence`, `positions`), or caught by the probes of an admission.
"""

from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel, masking_utils

from threefold.errors import Problem
from threefold.mesh.topology import Topology
from threefold.model.context_parallel import attention_choice
from threefold.model.context_parallel.positions import shares_numbers
from threefold.model.context_parallel.recurrence import carriers
from threefold.model.layer_kinds import heads_of
from threefold.plan.choices import heads_divide

_MASKS = {name for name in vars(masking_utils) if "mask" in name.lower()}
_ALONE = "--mesh.cp 1   (use mesh.dp or mesh.dp_shard instead)"
_WHOLE_ROWS = "--data.document_mask false"


def direction_problems(model: Any, *, pretrained: bool) -> list[Problem]:
    """Why a model is not causal; empty if it is.

    Args:
        pretrained: its weights are given, with a config.json, and not random.
    """
    name = model.config.model_type
    for inner in _models(model):
        config: Any = inner.config
        # Its config may let it see both sides: bert's does unless it is a decoder.
        two_masks = {"create_bidirectional_mask", "is_decoder"} <= _words(inner)
        if getattr(config, "is_causal", True) and not (two_masks and not config.is_decoder):
            continue
        key = "is_decoder: true" if getattr(config, "is_causal", True) else "is_causal: true"
        what = f"the model {name!r} is not causal: with its config each token sees the ones after it"
        if not pretrained:
            expected = "a model that predicts each token from the ones before it"
            return [Problem(what, expected, f"--model.config '{{..., {key}}}'")]
        return [
            Problem(
                what,
                "a causal language model: these weights were trained to see both sides of a token",
                f"use a causal model; to continue training this one as causal: {key} in config.json",
            )
        ]
    return []


def split_problems(method: str, topology: Topology, model: Any) -> list[Problem]:
    """Why this architecture's sequences cannot be split as asked; empty if they can.

    Args:
        model: without storage.
    """
    if problems := cp_problems(model, topology):
        return problems
    if method == "ulysses" and not heads_divide(heads_of(model.config), topology):
        what = f"mesh.cp_method = ulysses, but the heads of a tp rank do not divide by mesh.cp ({topology.cp})"
        expected = "attention heads and key-value heads that are multiples of mesh.tp x mesh.cp"
        return [
            Problem(what, expected, "--mesh.cp_method gather   (works for any number of heads)")
        ]
    return []


def cp_problems(model: Any, topology: Topology) -> list[Problem]:
    """Why the rows of this architecture cannot be split over cp ranks; empty if they can."""
    if topology.cp == 1:
        return []
    begin = f"mesh.cp = {topology.cp}, but {model.config.model_type!r}"
    if kinds := sorted({type(module).__name__ for module in carriers(model)}):
        return [
            Problem(
                f"{begin} has recurrent layers ({', '.join(kinds)})",
                "attention layers only: a recurrent state runs along the whole sequence",
                _ALONE,
            )
        ]
    if _masks_itself(model):
        return [
            Problem(
                f"{begin} makes its masks itself, for the tokens that it is given",
                "masks from transformers' mask functions, which are given true positions",
                _ALONE,
            )
        ]
    if (why := attention_choice.own_attention(model)) is not None:
        expected = "attention that is selected by name: it gets the keys of the other cp ranks"
        return [Problem(f"{begin} keeps its own attention: {why}", expected, _ALONE)]
    if shares_numbers(model):
        expected = "positions that can be passed in: a cp rank holds a part of the head and a part of the tail"
        return [
            Problem(f"{begin} numbers the tokens that it is given from 0", expected, _ALONE)
        ]
    return []


def document_problems(model: Any) -> list[Problem]:
    """Why the documents of a row cannot be kept apart; empty if they can."""
    begin = f"data.document_mask = true, but {model.config.model_type!r}"
    if _masks_itself(model):
        expected = "masks from transformers' mask functions, which keep documents apart"
        return [
            Problem(f"{begin} makes its masks itself, for whole rows", expected, _WHOLE_ROWS)
        ]
    if shares_numbers(model):
        expected = "positions that can restart with each document"
        return [Problem(f"{begin} gives every row the same positions", expected, _WHOLE_ROWS)]
    if (layer := attention_choice.layer_with_joined_keys(model)) is not None:
        return [
            Problem(
                f"{begin} has a {layer}, which takes keys of a row several at a time",
                "keys that each stand for one token: what stands for several would join two documents",
                _WHOLE_ROWS,
            )
        ]
    return []


def _masks_itself(model: Any) -> bool:
    attends = next(carriers(model), None) is None
    return attends and not any(_words(inner) & _MASKS for inner in _models(model))


def _models(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (
        module
        for module in attention_choice.text_modules(model)
        if isinstance(module, PreTrainedModel)
    )


def _words(model: nn.Module) -> set[str]:
    """The names that the code of a model's class mentions."""
    return {
        word
        for method in attention_choice.methods(type(model))
        for word in _names(method.__code__)
    }


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
