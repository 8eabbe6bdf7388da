"""Published chat templates, those that this machine has: nothing of a row is lost, or learnt, in silence.

tests/published_templates.txt names them by hash. They are looked for in the Hub's cache, and below the folder that
THREEFOLD_TEMPLATES names; nothing is fetched. Every text of a row has a word that is in no other text, so what a
template writes, and what is trained on, is seen by a search for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from threefold.data.chat.formats import Example, RowError
from threefold.data.chat.loss_mask import Encoder
from threefold.data.chat.template import ChatTemplate

LIST = Path(__file__).parent.parent / "published_templates.txt"
ELSEWHERE = "THREEFOLD_TEMPLATES"
_CONTROL = re.compile(
    r"<\|[\w:]+\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|<\uff5c[^\uff5c]+\uff5c>"
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "zqtools",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "d"}},
            },
        },
    }
]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look", "arguments": {"city": "zqargument"}},
}
RESULT = {"role": "tool", "content": "zqresult", "name": "look", "tool_call_id": "call00001"}
_ASKED = {"role": "user", "content": "zqask."}
_ANSWER = {"role": "assistant", "content": "zqanswer."}
ROWS: dict[str, list[dict[str, Any]]] = {
    "one turn": [_ASKED, _ANSWER],
    "system": [{"role": "system", "content": "zqsystem."}, _ASKED, _ANSWER],
    "three turns": [
        _ASKED,
        _ANSWER,
        {"role": "user", "content": "zqmore."},
        {**_ANSWER, "content": "zqagain!"},
    ],
    "reasoning": [_ASKED, {**_ANSWER, "reasoning_content": "zqreason"}],
    "thinking": [_ASKED, {**_ANSWER, "thinking": "zqreason"}],
    "reasoning earlier": [
        _ASKED,
        {**_ANSWER, "reasoning_content": "zqreason"},
        _ASKED,
        {**_ANSWER, "content": "zqend."},
    ],
    "call": [
        _ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        RESULT,
        _ANSWER,
    ],
    "call and words": [
        _ASKED,
        {"role": "assistant", "content": "zqwords.", "tool_calls": [CALL]},
        RESULT,
        _ANSWER,
    ],
    "call at the end": [_ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
}


def listed() -> dict[str, str]:
    """Git's hash of each published template -> where it is published."""
    found, where = {}, ""
    for line in LIST.read_text().splitlines():
        if line.startswith("  "):
            blob, path = line.split()
            found.setdefault(blob, f"{where}/{path}")
        elif not line.startswith("#"):
            where = line.split()[0]
    return found


def texts_here() -> Iterator[str]:
    """The chat templates that lie on this machine."""
    hub = (
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub"
    )
    for folder in (os.environ.get(ELSEWHERE), hub):
        root = Path(folder).expanduser() if folder else None
        for path in sorted(root.rglob("*.jinja")) if root is not None and root.is_dir() else ():
            yield path.read_text(encoding="utf-8", errors="replace")
        for path in (
            sorted(root.rglob("tokenizer_config.json"))
            if root is not None and root.is_dir()
            else ()
        ):
            template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            yield from (
                [template]
                if isinstance(template, str)
                else [each["template"] for each in template or ()]
            )


def hash_of(text: str) -> str:
    content = text.encode()
    return hashlib.sha1(
        b"blob %d\0" % len(content) + content, usedforsecurity=False
    ).hexdigest()


LISTED = listed()
HERE = {LISTED[name]: text for text in texts_here() if (name := hash_of(text)) in LISTED}


@cache
def tokenizer_of(source: str) -> Tokenizer:
    """A token for each byte, and the control tokens that a template names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    controls = sorted({"<|bos|>", "<|eos|>", *_CONTROL.findall(source)})
    made.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in controls]
    )
    return made


def words_of(value: Any) -> list[str]:
    return re.findall(r"zq[a-z]+", json.dumps(value))


def test_list_names_150_templates_by_their_hashes() -> None:
    lines = LIST.read_text().splitlines()
    files = [line.split() for line in lines if line.startswith("  ")]
    assert len(files) >= 150 and all(re.fullmatch("[0-9a-f]{40}", blob) for blob, _ in files)
    origins = [line.split() for line in lines if not line.startswith(("  ", "#"))]
    assert all("/" in name and re.fullmatch("[0-9a-f]{40}", commit) for name, commit in origins)
    assert hash_of("what is up, doc?") == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"


@pytest.mark.skipif(
    not HERE, reason=f"no published template in the Hub's cache, or below ${ELSEWHERE}"
)
@pytest.mark.parametrize("name", sorted(HERE) or ["none"])
def test_published_template_loses_and_learns_nothing_in_silence(name: str) -> None:
    source = HERE[name]
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    template = ChatTemplate(source, special, {"date": "2026-01-31"})
    encoder = Encoder(tokenizer_of(source), 0, template, "assistant", lost_texts="count")
    refused = {}
    for form, messages in ROWS.items():
        tools = TOOLS if any("tool_calls" in each for each in messages) else None
        # No null reaches a template: a row is read without them.
        said = [
            {key: value for key, value in each.items() if value is not None}
            for each in messages
        ]
        try:
            found = encoder.labelled(
                Example(tuple(said), tools=tuple(tools) if tools else None)
            )
        except RowError as error:
            refused[form] = error.what
            continue
        text = encoder.backend.decode(found.ids.tolist(), skip_special_tokens=False)
        learnt = encoder.backend.decode(
            found.ids[found.loss_mask].tolist(), skip_special_tokens=False
        )
        ours = [
            word for each in messages if each["role"] == "assistant" for word in words_of(each)
        ]
        others = [
            word
            for each in (*messages, tools)
            if not each or "zq" in str(each)
            for word in words_of(each)
        ]
        others = [word for word in others if word not in ours]
        lost = sum((found.lost or {}).values())
        assert not [word for word in others if word in learnt], (form, learnt)
        # Reasoning of earlier turns is of texts that some templates leave out.
        missing = {word for word in (*ours, *others) if word not in text}
        assert len(missing) <= lost, (form, missing, dict(found.lost or {}))
        assert not [word for word in ours if word in text and word not in learnt], (
            form,
            text,
            learnt,
        )
    if len(refused) == len(ROWS):
        pytest.skip(f"every row is refused: {refused['call']}")
