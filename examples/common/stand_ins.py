"""Writes small stand-ins of a dataset and a tokenizer of the Hub, under their names, where there is no network.

python examples/common/stand_ins.py

`load_dataset` and `AutoTokenizer` take a folder of that name before they ask the Hub: run the example from the same
folder. The files have the form of the published ones (a parquet file with `text`; byte-level BPE), and other contents.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DATASET, TOKENIZER = Path("roneneldan/TinyStories"), Path("HuggingFaceTB/SmolLM2-1.7B")
END = "<|endoftext|>"
# Does not divide by the data ranks of the example; a few stories are longer than its 1,024 tokens.
STORIES = 1001


def stories() -> list[str]:
    names, animals = ("Lily", "Tom", "Anna", "Ben"), ("dog", "bird", "frog", "cat", "horse")
    return [
        f"Story {number}. Once upon a time, {names[number % 4]} met a {animals[number % 5]}. "
        + "They played in the park and were happy. " * (number % 40 if number % 100 else 200)
        for number in range(STORIES)
    ]


def main() -> None:
    texts = stories()
    DATASET.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), DATASET / "train.parquet")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(TOKENIZER)
    print(f"{DATASET} of {len(texts)} stories, {TOKENIZER} of {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
