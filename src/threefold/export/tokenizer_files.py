"""A run's tokenizer, with its chat template, in the folder of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from threefold.checkpoint.chat_template import template_of
from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.config.schema import Config
from threefold.data.tokens import byte_backend


def save_tokenizer(checkpoint: Checkpoint, config: Config, to: Path) -> None:
    """Writes the tokenizer that the run trained with to the folder `to`; of a custom loop that of its model, if any."""
    try:
        tokenizer = tokenizer_of(config)
    except (OSError, ValueError):
        if "loop" in checkpoint.manifest():
            return  # it has trained on ids, by whatever tokenizer
        raise
    if (template := template_of(checkpoint, config)) is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(to)


def tokenizer_of(config: Config) -> Any:
    """The tokenizer of a run in transformers' form."""
    name = config.data.tokenizer or config.model.name_or_path or "bytes"
    revision = config.model.revision if name == config.model.name_or_path else None
    return (
        byte_tokenizer()
        if name == "bytes"
        else AutoTokenizer.from_pretrained(name, revision=revision)
    )


def byte_tokenizer() -> Any:
    """Returns the tokenizer `bytes` in transformers' form: the same ids, with 256 as the end token."""
    from transformers import PreTrainedTokenizerFast

    backend = byte_backend()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
