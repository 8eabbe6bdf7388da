"""Tokenizers: ids without special tokens, the end token, vocabulary and fingerprint."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from threefold.data.text.source import Labels
from threefold.data.tokens import ByteTokenizer, for_texts, load_tokenizer, spelled_out
from threefold.errors import DataError

TEXT = ["the cat sat on the mat", "a dog and a cat", "the dog sat", "numbers 0 1 2 3"]
AS_TEXT = json.dumps({"eos_token": "</s>"})


def train_bpe() -> Tokenizer:
    """A byte-level BPE that adds special tokens, truncates and pads when asked to: all to be ignored."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(AS_TEXT)
    return tmp_path


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_the_text(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids.tolist(), 256]) == text


def test_bytes_vocabulary() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert [len(ids) for ids in tokenizer.encode_batch(["", "é", "ab"])] == [0, 2, 2]


def test_folder_encodes_whole_documents_without_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    texts = [*TEXT, "", "the cat " * 50]
    plain = train_bpe()
    plain.no_truncation()
    plain.no_padding()
    encoded = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == [
        plain.encode(t, add_special_tokens=False).ids for t in texts
    ]
    assert not {0, 1} & {int(i) for ids in encoded for i in ids}
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert tokenizer.decode([0, *encoded[0].tolist(), 1]) == texts[0]


def test_vocabulary_counts_to_the_largest_id(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.vocab_size, tokenizer.end_id) == (train_bpe().get_vocab_size(), 1)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["zzz"] = 1000
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(str(folder)).vocab_size == 1001


@pytest.mark.parametrize(
    ("files", "end_id"),
    [
        (
            {
                "tokenizer_config.json": {"eos_token": "</s>"},
                "config.json": {"eos_token_id": 9},
            },
            1,
        ),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>", "lstrip": False}}}, 1),
        (
            {
                "tokenizer_config.json": {"eos_token": None},
                "special_tokens_map.json": {"eos_token": "<s>"},
            },
            0,
        ),
        (
            {
                "generation_config.json": {"eos_token_id": [5, 6]},
                "config.json": {"eos_token_id": 7},
            },
            5,
        ),
        ({"config.json": {"eos_token_id": 7}}, 7),
        ({"config.json": {"text_config": {"eos_token_id": 8}}}, 8),
        (
            {
                "tokenizer_config.json": {"eos_token": "<unknown>"},
                "config.json": {"eos_token_id": 0},
            },
            0,
        ),
    ],
)
def test_end_token(folder: Path, files: dict[str, object], end_id: int) -> None:
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert load_tokenizer(str(folder)).end_id == end_id


def test_fingerprint_follows_content_and_end_token_but_not_the_place(
    folder: Path, tmp_path: Path
) -> None:
    base = load_tokenizer(str(folder)).fingerprint
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (copy / "config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(str(copy)).fingerprint == base
    (copy / "config.json").write_text('{"eos_token_id": 2}')
    assert load_tokenizer(str(copy)).fingerprint != base
    assert load_tokenizer("bytes").fingerprint != base


def test_pickles(folder: Path) -> None:
    for name in ("bytes", str(folder)):
        tokenizer = load_tokenizer(name)
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.encode_batch(TEXT)[0].tolist() == tokenizer.encode_batch(TEXT)[0].tolist()
        assert again.fingerprint == tokenizer.fingerprint


def test_older_vocabulary_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"])
    )
    config = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    tokenizer = load_tokenizer(str(tmp_path))
    (ids,) = tokenizer.encode_batch(["the cats"])
    assert (ids.tolist(), tokenizer.end_id, tokenizer.vocab_size) == ([5, 6, 7], 3, 8)


def test_fingerprint_of_a_tokenizer_in_python_follows_its_merges(tmp_path: Path) -> None:
    """The vocabulary is the same, and the ids of a text are others: a store of these must not be taken for those."""
    vocabulary = {text: id for id, text in enumerate(["<unk>", "a@@", "b", "ab", "c"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    config = {"tokenizer_class": "CTRLTokenizer", "eos_token": "c"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ctrl"}))
    seen = []
    for merges in ("#version\na b</w>\n\n", "#version\nb a\n\n"):
        (tmp_path / "merges.txt").write_text(merges)
        tokenizer = load_tokenizer(str(tmp_path))
        seen.append((tokenizer.encode_batch(["ab"])[0].tolist(), tokenizer.fingerprint))
    assert [ids for ids, _ in seen] == [[3], [1, 2]]
    assert seen[0][1] != seen[1][1]


def test_hub_id_comes_from_the_cache_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a Hub id, with the download itself replaced by a folder."""
    asked = {}

    def snapshot_download(
        repo_id: str, *, revision: str | None, allow_patterns: list[str]
    ) -> str:
        asked.update(repo_id=repo_id, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    tokenizer = load_tokenizer("owner/name", revision="abc")
    assert (tokenizer.name, tokenizer.end_id) == ("owner/name", 1)
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "abc")
    assert "tokenizer.json" in asked["patterns"] and not any(
        p.endswith(".safetensors") for p in asked["patterns"]
    )


def test_folder_loads_no_torch(folder: Path) -> None:
    code = "import sys, threefold.data.tokens as t; t.load_tokenizer(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert done.stdout.strip() == "False"


def test_unreadable_tokenizer_is_a_data_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(str(folder))


# --- texts of a source: what begins each, and control tokens inside ------------------------------------------------


def test_text_begins_as_the_tokenizer_begins_a_single_one(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    texts = ["the cat", ""]
    plain = [each.tolist() for each in tokenizer.encode_batch(texts)]
    for bos in ("auto", True):
        begun = for_texts(tokenizer, Labels(bos=bos, control_tokens="text"))
        assert [each.tolist() for each in begun.encode_batch(texts)] == [
            [0, *ids] for ids in plain
        ]
    without = for_texts(tokenizer, Labels(bos=False, control_tokens="ids"))
    assert [each.tolist() for each in without.encode_batch(texts)] == plain
    assert without.recipe == tokenizer.fingerprint == begun.fingerprint != begun.recipe
    assert pickle.loads(pickle.dumps(begun)).bos_id == 0


def test_control_tokens_that_a_text_spells_out(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    warning = "</s> in a text stays text. As control tokens: --data.control_tokens ids"
    for control_tokens, expected in (("text", warning), ("ids", None)):
        own = for_texts(tokenizer, Labels(control_tokens=control_tokens))
        ids = np.append(own.encode_batch(["the cat</s> sat"])[0], tokenizer.end_id)
        assert spelled_out(own, ids) == expected
    assert spelled_out(tokenizer, [tokenizer.end_id]) is None
    assert spelled_out(ByteTokenizer(), [256]) is None


def test_tokenizer_that_begins_no_text_begins_none(folder: Path) -> None:
    backend = train_bpe()
    backend.post_processor = processors.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    assert for_texts(tokenizer, Labels(bos="auto", control_tokens="text")).bos_id is None
    with pytest.raises(DataError, match="names no token that begins a text"):
        for_texts(tokenizer, Labels(bos=True, control_tokens="text"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": {"content": "<s>"}})
    )
    assert (
        for_texts(load_tokenizer(str(folder)), Labels(bos=True, control_tokens="text")).bos_id
        == 0
    )
    assert for_texts(ByteTokenizer(), Labels(bos="auto", control_tokens="text")).bos_id is None
    with pytest.raises(DataError, match=r"data\.bos = true, but the tokenizer 'bytes'"):
        for_texts(ByteTokenizer(), Labels(bos=True, control_tokens="text"))


def test_control_token_that_is_spelled_out_stays_text(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    texts = ["a </s> b", "<s>", "plain"]
    as_text = for_texts(tokenizer, Labels(bos=False, control_tokens="text"))
    for ids, text in zip(as_text.encode_batch(texts), texts, strict=True):
        assert not {0, 1} & set(ids.tolist())
        assert tokenizer.decode(ids) == text
    as_ids = for_texts(tokenizer, Labels(bos=False, control_tokens="ids"))
    assert [1 in ids.tolist() for ids in as_ids.encode_batch(texts)] == [True, False, False]
    # The backend is shared: one setting must not leak into the other.
    assert [1 in ids.tolist() for ids in tokenizer.encode_batch(texts)] == [True, False, False]
