"""What stands beside a model's weights in a Hugging Face folder: config, generation config, tokenizer."""

from __future__ import annotations

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
        _generation_config(model, config).save_pretrained(to)
    save_tokenizer(config, to)


def _generation_config(model: Any, config: Config) -> Any:
    if config.model.name_or_path is not None:
        try:
            return GenerationConfig.from_pretrained(config.model.name_or_path, revision=config.model.revision)
        except OSError:  # it has none, or is not there any more
            pass
    return model.generation_config


def save_tokenizer(config: Config, to: Path) -> None:
    """Writes the tokenizer that the run's data was read with."""
    name = config.data.tokenizer or config.model.name_or_path or "bytes"
    if name == "bytes":
        byte_tokenizer().save_pretrained(to)
        return
    revision = config.model.revision if name == config.model.name_or_path else None
    AutoTokenizer.from_pretrained(name, revision=revision).save_pretrained(to)


def byte_tokenizer() -> Any:
    """The tokenizer `bytes` as transformers knows tokenizers: the same ids, 256 as the end token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    characters = _byte_characters()
    backend = Backend(models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def _byte_characters() -> list[str]:
    # The printable character that stands for each byte in byte-level tokenizers (GPT-2): itself where it is printable
    # in Latin-1, else the next free code point from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, free = [], 256
    for byte in range(256):
        characters.append(chr(byte) if byte in printable else chr(free))
        free += byte not in printable
    return characters
