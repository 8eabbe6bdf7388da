"""Writes the files of a Hugging Face folder other than the weights: config, generation config, tokenizer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, GenerationConfig

from threefold.config.schema import Config


def save_descriptions(model: Any, config: Config, to: Path) -> None:
    """Writes the model's config and code, its generation config and the run's tokenizer to the folder `to`."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(to)
    if model.is_remote_code():
        transformers.dynamic_module_utils.custom_object_save(model, to, config=model.config)
    if model.can_generate():
        generation, name = model.generation_config, config.model.name_or_path
        if name is not None:
            with contextlib.suppress(OSError):  # the model has none, or no longer exists
                generation = GenerationConfig.from_pretrained(name, revision=config.model.revision)
        generation.save_pretrained(to)
    save_tokenizer(config, to)


def save_tokenizer(config: Config, to: Path) -> None:
    """Writes the tokenizer with which the run's data was read."""
    name = config.data.tokenizer or config.model.name_or_path or "bytes"
    if name == "bytes":
        _byte_tokenizer().save_pretrained(to)
        return
    revision = config.model.revision if name == config.model.name_or_path else None
    AutoTokenizer.from_pretrained(name, revision=revision).save_pretrained(to)


def _byte_tokenizer() -> Any:
    """Returns the tokenizer `bytes` in transformers' form: the same ids, with 256 as the end token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = Backend(models.BPE(vocab={bytes_to_unicode()[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False)
