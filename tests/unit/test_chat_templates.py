# ruff: noqa: RUF001, SIM905
"""Targets of conversations on the formats of published chat templates, against a brute-force oracle.

The templates of tests/templates render the formats of the families they are named by, in words of our own.
"""

from __future__ import annotations

import datetime
import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from oracle_of_loss_masks import Family, Tokens, check, expected, seen
from threefold.data.chat.formats import Example, RowError, columns_of
from threefold.data.chat.labeller import ends_turns
from threefold.data.chat.loss_mask import Encoder
from threefold.data.chat.preference import labelled_pair
from threefold.data.chat.template import ChatTemplate
from threefold.data.text.source import Labelled
from threefold.data.tokens import VocabularyTokenizer

NOTHING = "no token of it would be trained on"
FOLDER = Path(__file__).parent.parent / "templates"
LLAMA3 = "<|start_header_id|>assistant<|end_header_id|>\n\n"
CHATML = "<|im_start|>assistant\n"
COMMAND = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
DEEPSEEK = ("<｜Assistant｜>", "<｜Assistant｜><think>\n", "<｜tool▁outputs▁end｜>")
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
GRANITE = "<|start_of_role|>assistant<|end_of_role|>"
INST = ("[/INST]", "[/TOOL_RESULTS]")
ALTERNATE: dict[str, Any] = {"twice": False}
TEXT: dict[str, Any] = {"tokenizer": "text"}
TOOLS: dict[str, Any] = {"tools": True}
# Family -> header(s), end token, and what else is known of it.
FAMILIES: dict[str, tuple[str | tuple[str, ...], str | tuple[str, ...], dict[str, Any]]] = {
    "llama2": (" [/INST]", "</s>", {**ALTERNATE, "tokenizer": "prefixed"}),
    "llama3": (LLAMA3, "<|eot_id|>", {}),
    "llama3_1": (LLAMA3, "<|eot_id|>", TOOLS),
    "llama4": ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>", TOOLS),
    "qwen2": (CHATML, "<|im_end|>", {}),
    "qwen2_5": ((CHATML, "<|im_start|>assistant"), "<|im_end|>", TOOLS),
    "qwen3": (CHATML, "<|im_end|>", TOOLS),
    "qwen3_instruct_2507": (CHATML, "<|im_end|>", TOOLS),
    "qwen3_thinking_2507": ((CHATML, CHATML + "<think>\n"), "<|im_end|>", {}),
    "mistral_v0_1": (
        " [/INST]",
        "</s>",
        {**ALTERNATE, "system": False, "tokenizer": "prefixed"},
    ),
    "mixtral": (" [/INST]", "</s>", {**ALTERNATE, "tokenizer": "pieces"}),
    "mistral_v3": (INST, "</s>", {**ALTERNATE, **TOOLS}),
    "mistral_v7_tekken": ("[/INST]", "</s>", ALTERNATE),
    "mistral_small_3_1": (INST, "</s>", {**ALTERNATE, **TOOLS}),
    "gemma2": (
        "<start_of_turn>model\n",
        "<end_of_turn>",
        {**ALTERNATE, "system": False, "tokenizer": "pieces"},
    ),
    "gemma3": (
        "<start_of_turn>model\n",
        "<end_of_turn>",
        {**ALTERNATE, "tokenizer": "unigram"},
    ),
    "phi3": ("<|assistant|>\n", "<|end|>", {}),
    "phi3_5": ("<|assistant|>\n", "<|end|>", {}),
    "phi4": ("<|im_start|>assistant<|im_sep|>", "<|im_end|>", {}),
    "phi4_mini": ("<|assistant|>", "<|end|>", {}),
    "deepseek_v2": ("Assistant:", DEEPSEEK_END, TEXT),
    "deepseek_v3": (DEEPSEEK[::2], DEEPSEEK_END, TOOLS),
    "deepseek_r1": (DEEPSEEK[0], DEEPSEEK_END, {}),
    "deepseek_r1_distill": (DEEPSEEK[:2], DEEPSEEK_END, {}),
    "deepseek_v3_1": (
        ("<｜Assistant｜></think>", "<｜tool▁output▁end｜>"),
        DEEPSEEK_END,
        {**TOOLS, "twice": False},
    ),
    "chatml": (CHATML, "<|im_end|>", {}),
    "chatml_marked": (CHATML, "<|im_end|>", {}),
    "chatml_marked_inside": (CHATML, "<|im_end|>", {}),
    "zephyr": ("<|assistant|>\n", "</s>", TEXT),
    "command_r": (COMMAND, "<|END_OF_TURN_TOKEN|>", ALTERNATE),
    "command_r7b": (COMMAND, "<|END_OF_TURN_TOKEN|>", TOOLS),
    "aya": (COMMAND, "<|END_OF_TURN_TOKEN|>", {}),
    "glm4": ("<|assistant|>", "", {}),
    "glm4_5": (
        "<|assistant|>",
        "",
        {**TOOLS, "closing": r"(\n<think></think>)?(</arg_value>\n</tool_call>)?"},
    ),
    "granite3": (GRANITE, "<|end_of_text|>", {}),
    "granite4": (GRANITE, "<|end_of_text|>", TOOLS),
    "smollm2": (CHATML, "<|im_end|>", {}),
    "smollm3": (CHATML, "<|im_end|>", {}),
    "olmo2": ("<|assistant|>\n", "<|endoftext|>", TEXT),
    "tulu3": ("<|assistant|>\n", "<|end_of_text|>", TEXT),
    "gpt_oss": ("<|start|>assistant", ("<|return|>", "<|end|>", "<|call|>"), TOOLS),
    "falcon3": ("<|assistant|>\n", "<|endoftext|>", TEXT),
    "yi": (CHATML, "<|im_end|>", {"twice": False}),
    "internlm2": (CHATML, "<|im_end|>", {}),
    "vicuna": (" ASSISTANT:", "</s>", {"tokenizer": "prefixed"}),
    "alpaca": ("### Response:\n", "</s>", TEXT),
    "nemotron_llama": (LLAMA3, "<|eot_id|>", {}),
    "nemotron_nano_2": (
        ("<SPECIAL_11>Assistant\n", "<SPECIAL_11>Assistant\n<think>\n\n"),
        "<SPECIAL_12>",
        {},
    ),
    "lfm2": (CHATML, "<|im_end|>", TOOLS),
    "kimi_k2": ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>", TOOLS),
    "minimax_m1": ("<beginning_of_sentence>ai name=assistant\n", "<end_of_sentence>", {}),
    "minimax_m2": (("]~b]ai\n", "]~b]ai\n<think>\n"), "[e~[", TOOLS),
    "exaone3_5": ("[|assistant|]", "[|endofturn|]", {}),
    "exaone4": ("[|assistant|]\n<think>\n\n</think>\n\n", "[|endofturn|]", {}),
    "hermes3": ((CHATML, CHATML[:-1]), "<|im_end|>", TOOLS),
    "stablelm_zephyr": ("<|assistant|>\n", "<|endoftext|>", {"system": False}),
    "openchat": ("GPT4 Correct Assistant:", "<|end_of_turn|>", {}),
    "jamba": ("<|bom|><|assistant|>", "<|eom|>", {}),
    "seed_oss": ("<seed:bos>assistant\n", "<seed:eos>", TOOLS),
}
_SPECIAL = {
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", DEEPSEEK_END),
    "command": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "gemma": ("<bos>", "<eos>"),
    "text": ("<|endoftext|>", "<|endoftext|>"),
}
_KIN = {
    "llama3_1": "llama3",
    "llama4": "llama3",
    "nemotron_llama": "llama3",
    "aya": "command",
    "lfm2": "llama3",
}
_KIN |= {
    name: "text"
    for name in (
        "olmo2",
        "falcon3",
        "phi3",
        "phi3_5",
        "phi4_mini",
        "internlm2",
        "stablelm_zephyr",
    )
}


@cache
def family(name: str) -> Family:
    header, end, known = FAMILIES[name]
    kin = _KIN.get(name) or next((each for each in _SPECIAL if name.startswith(each)), "llama2")
    first, last = _SPECIAL[kin]
    if name == "tulu3":
        last = "<|end_of_text|>"
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    headers, ends = ((each,) if isinstance(each, str) else each for each in (header, end))
    return Family(
        name,
        source,
        {"bos_token": first, "eos_token": last},
        headers,
        [e for e in ends if e],
        **known,
    )


CONTROLS = """
<s> </s> <bos> <eos> <|begin_of_text|> <|end_of_text|> <|endoftext|> <|eot_id|> <|start_header_id|> <|end_header_id|>
<|header_start|> <|header_end|> <|eot|> <|im_start|> <|im_end|> <|im_sep|> <start_of_turn> <end_of_turn> [INST] [/INST]
[TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]
<|system|> <|user|> <|assistant|> <|end|> <|tool|> <|/tool|> <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜>
<｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <BOS_TOKEN>
<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|START_RESPONSE|>
<|END_RESPONSE|> <|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|START_TOOL_RESULT|>
<|END_TOOL_RESULT|> [gMASK] <sop> <|observation|> <|start_of_role|> <|end_of_role|> <|start|> <|channel|> <|message|>
<|return|> <|call|> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12> <|tool_list_start|> <|tool_list_end|> <|tool_call_start|>
<|tool_call_end|> <|tool_response_start|> <|tool_response_end|> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|>
<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|>
<beginning_of_sentence> <end_of_sentence> ]~!b[ ]~b] [e~[ [|system|] [|user|] [|assistant|] [|endofturn|]
<|end_of_turn|> <|startoftext|> <|bom|> <|eom|> <seed:bos> <seed:eos> <seed:think> </seed:think> <seed:tool_call>
</seed:tool_call>
""".split()
# Those that stand alone where the headers of turns are words.
FEW = [
    "<s>",
    "</s>",
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
]
FEW += ["<|im_end|>", "<|eot_id|>", "<｜begin▁of▁sentence｜>", DEEPSEEK_END]


def _words() -> list[str]:
    """What the tokenizers learn from. ASCII alone, so that other letters are several tokens each."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))]
    plain = "\n\n".join(
        re.sub(r"\{%.*?%\}", " ", source, flags=re.S) for source in sources
    ).replace("\\n", "\n")
    return [
        re.sub(r"[^\x00-\x7f]", " ", text)
        for text in (plain, *(" ".join(TEXTS) for _ in range(5)))
    ]


@cache
def tokens_of(kind: str) -> Tokens:
    """A small tokenizer: of bytes, with all control tokens or a few; or of pieces, merged or likely."""
    of_bytes = kind in ("all", "text")
    before: Any = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if of_bytes
        else pre_tokenizers.Metaspace()
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = before
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet()
        if of_bytes
        else [chr(code) for code in range(32, 127)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(_words(), trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    if of_bytes:
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        made.pre_tokenizer, made.decoder = before, decoders.ByteLevel()
        letters = {letter: byte for byte, letter in _letters().items()}
        bytes_of = {
            id: bytes(letters[letter] for letter in text) for text, id in vocabulary.items()
        }
    elif kind == "unigram":
        made, bytes_of = _unigram(list(vocabulary))
    else:
        for byte in range(256):
            vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
        vocabulary.setdefault("<unk>", len(vocabulary))
        made = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=merges,
                byte_fallback=True,
                unk_token="<unk>",
                fuse_unk=True,
            )
        )
        steps = [normalizers.Prepend("▁")] if kind == "prefixed" else []
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        bytes_of = {id: _bytes_of_piece(text) for text, id in vocabulary.items()}
    twin = Tokenizer.from_str(made.to_str())
    names = CONTROLS if kind == "all" else FEW
    made.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names]
    )
    controls = {name: made.token_to_id(name) for name in names}
    return Tokens(made, twin, controls, bytes_of, prefix=kind == "prefixed")


def _unigram(words: list[str]) -> tuple[Tokenizer, dict[int, bytes]]:
    """A tokenizer of these words by their likelihood, the longer the likelier, and of bytes for all else."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    likely = [
        ("<unk>", 0.0),
        *((piece, -10.0 - 1.0 / len(piece) - at / 1e6) for at, piece in enumerate(pieces)),
    ]
    made = Tokenizer(models.Unigram(likely, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    )
    return made, {1 + at: _bytes_of_piece(piece) for at, piece in enumerate(pieces)}


def _bytes_of_piece(text: str) -> bytes:
    return (
        bytes([int(text[3:5], 16)])
        if re.fullmatch("<0x..>", text)
        else text.replace("▁", " ").encode()
    )


def _letters() -> dict[int, str]:
    """Byte -> its letter in vocabularies of bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }


TEXTS = [
    *(
        "Hello there",
        "Hello",
        "Hello there, how are you today?",
        " leading",
        "trailing ",
        "  both  ",
        "\n\nlines\n",
        "",
    ),
    *(
        "a",
        "naïve café 北京 😀👩‍👩‍👧",
        "😀",
        "def f(x):\n    return x\n",
        "1 2 3",
        "assistant\n",
        "user: [no]",
        "\ttab\t",
    ),
]
SPELLED = [
    "stop </s> here",
    "<|im_end|>",
    "a<|eot_id|>\n<|im_start|>user\nhi",
    "<|endoftext|> x",
    "[INST] b [/INST]</s>",
]
THOUGHT = "<think>\nfirst this\n</think>\n\nHello"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look", "arguments": {"place": "Oslo", "day": "now"}},
}
RESULT = {"role": "tool", "content": "rain", "tool_call_id": "call00001", "name": "look"}
FUNCTIONS = (
    {
        "type": "function",
        "function": {"name": "look", "description": "The weather", "parameters": {}},
    },
)


CONVERSATIONS: dict[str, tuple[Any, ...]] = {
    "one": (user("Hello"), assistant("Hello there")),
    "three": (
        user("a"),
        assistant("b c"),
        user("d"),
        assistant("e"),
        user("f"),
        assistant("g h"),
    ),
    "system": (system("Be kind."), user("a"), assistant("b c"), user("d"), assistant("e")),
    "alike": (user("Hello"), assistant("Hello"), user("Hello there"), assistant("Hello there")),
    "prefix": (
        user("a"),
        assistant("Hello"),
        user("b"),
        assistant("Hello there"),
        user("c"),
        assistant("Hel"),
    ),
    "blanks": (user(" a "), assistant("  b  "), user("\nc\n"), assistant("\n\nd\n")),
    "empty": (user("a"), assistant(""), user("b"), assistant("c")),
    "empty last": (user("a"), assistant("b"), user("c"), assistant("")),
    "letters": (user("naïve 😀"), assistant("café 北京 👩‍👩‍👧"), user("é"), assistant("😀")),
    "open": (user("a"), assistant("b"), user("c")),
    "spelled": (
        user("</s> a"),
        assistant("b <|im_end|> c</s>"),
        user("<|eot_id|>"),
        assistant("<|im_end|>"),
    ),
    "thinking": (user("a"), assistant(THOUGHT), user("b"), assistant(THOUGHT)),
    "reasoning": (
        user("a"),
        assistant("b", reasoning_content="mm"),
        user("c"),
        assistant("d", reasoning_content="nn"),
    ),
    "twice": (user("a"), assistant("b"), assistant("c d")),
    "first": (assistant("hi"), user("a"), assistant("b")),
    "tools": (
        user("a"),
        assistant("", tool_calls=[CALL]),
        RESULT,
        assistant("It rains."),
        user("b"),
        assistant("c"),
    ),
    "only calls": (
        user("a"),
        *(
            {"role": "assistant", "tool_calls": [CALL]},
            RESULT,
            assistant("It rains."),
            user("b"),
            assistant("c"),
        ),
    ),
    "words and calls": (
        user("a"),
        assistant("Let me see.", tool_calls=[CALL]),
        RESULT,
        assistant("It rains."),
    ),
    "thought calls": (
        user("a"),
        *(
            assistant("", reasoning_content="mm", tool_calls=[CALL]),
            RESULT,
            assistant("d", reasoning_content="nn"),
        ),
        *(user("b"), assistant("c", reasoning_content="oo")),
    ),
}
MODES = ["assistant", "last", "all"]


@cache
def encoder(name: str, train_on: str) -> Encoder:
    """What a template leaves out is no matter here."""
    known = family(name)
    template = ChatTemplate(known.source, known.special, {"date": "2024-07-26"})
    return Encoder(tokens_of(known.tokenizer).whole, 0, template, train_on, lost_texts="count")


def refusing(name: str, train_on: str) -> Encoder:
    return replace(encoder(name, train_on), lost_texts="refuse")


def same(
    what: str, tokens: Tokens, found: Labelled, wanted: tuple[list[int], list[bool]]
) -> None:
    ids, targets = wanted
    assert found.ids.tolist() == ids
    if found.loss_mask.tolist() != targets:
        shown = [
            (tokens.whole.decode([id], skip_special_tokens=False), bool(ours), theirs)
            for id, ours, theirs in zip(ids, found.loss_mask, targets, strict=True)
        ]
        raise AssertionError(f"{what}: {shown}")


DEPENDS = (
    "messages[3]: the chat template renders this turn in a way that depends on its content, so what the assistant "
    "wrote cannot be located"
)
ALTERNATES = "the chat template refuses it: Conversation roles must alternate user/assistant/user/assistant/..."
IN_TURN = "the chat template refuses it: Conversation roles must alternate user/assistant"
AFTER = "the chat template refuses it: After the optional system message, "
# Family -> the conversations that are refused, and what is said.
REFUSED: dict[str, dict[str, str]] = {
    "llama2": {"twice": IN_TURN, "first": IN_TURN},
    "mistral_v0_1": {"system": ALTERNATES, "twice": ALTERNATES, "first": ALTERNATES},
    "mixtral": {
        "twice": f"{AFTER}roles must alternate",
        "first": f"{AFTER}roles must alternate",
    },
    "mistral_v3": {
        each: f"{AFTER}conversation roles must alternate" for each in ("twice", "first")
    },
    "gemma2": {
        "system": "the chat template refuses it: System role not supported",
        **{"twice": ALTERNATES, "first": ALTERNATES},
    },
    "gemma3": {"twice": ALTERNATES, "first": ALTERNATES},
    "command_r": {"twice": ALTERNATES, "first": ALTERNATES},
    "exaone4": {"thinking": DEPENDS},
    "stablelm_zephyr": {
        "system": "the chat template refuses it: System messages are not supported"
    },
}
OTHERWISE = "the chat template renders the prompt differently when the completion follows"


def compared(name: str, messages: Any, tools: Any = None, modes: Any = MODES) -> str:
    """What became of a conversation: "equal", or what our code refuses. Differences fail."""
    known, tokens = family(name), tokens_of(family(name).tokenizer)
    refused = set()
    said = None
    for train_on in modes:
        try:
            found = encoder(name, train_on).labelled(Example(tuple(messages), tools=tools))
        except RowError as error:
            if error.what == NOTHING:
                assert not any(
                    expected(known, tokens, seen(known, messages, tools), train_on)[1]
                )
                continue
            assert error.what and error.expected
            refused.add(error.what)
            continue
        if said is None:
            said = seen(known, messages, tools)
        same(f"{name}, {train_on}", tokens, found, expected(known, tokens, said, train_on))
    return "; ".join(sorted(refused)) or "equal"


def functions(known: Family) -> Any:
    """The tools, for a template that writes them: some of those that write calls write no tools."""
    return FUNCTIONS if re.search(r"\btools\b", known.source) else None


def drawn(draw: random.Random, known: Family) -> tuple[list[Any], Any]:
    """A conversation that most templates take, and its tools."""
    tools = FUNCTIONS if known.tools and draw.random() < 0.4 else None
    messages = [system(_text(draw))] if known.system and draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 4)):
        messages.append(user(_text(draw)))
        if draw.random() < 0.1:
            break
        if tools and draw.random() < 0.6:
            arguments = {"place": draw.choice(["Oslo", "a b", "x\ny", "é 😀"]), "day": "now"}
            call = {**CALL, "function": {"name": "look", "arguments": arguments}}
            said = draw.choice(
                [
                    {},
                    {"content": ""},
                    {"content": "Let me see."},
                    {"reasoning_content": "mm nn"},
                ]
            )
            messages += [
                {"role": "assistant", "content": "", **said, "tool_calls": [call]},
                RESULT,
            ]
            if said == {}:
                del messages[-2]["content"]
        messages.append(assistant(_text(draw)))
        if draw.random() < 0.25:
            messages[-1]["reasoning_content"] = draw.choice(["mm", "one\ntwo", " x "])
        if known.twice and draw.random() < 0.1:
            messages.append(assistant(_text(draw)))
    return messages, tools and functions(known)


def _text(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.15:
        return draw.choice(SPELLED)
    if kind < 0.25:
        return draw.choice(
            [THOUGHT, "<think>mm</think>x", "</think>", "<think>\n\n</think>\n\nok"]
        )
    return (
        draw.choice(TEXTS)
        if kind < 0.8
        else draw.choice(TEXTS) + draw.choice(SPELLED) + draw.choice(TEXTS)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_without_an_end_of_answers_are_known(name: str) -> None:
    """Those of the table that have no end token; of others, what follows an answer ends it."""
    assert ends_turns(encoder(name, "assistant")) == bool(family(name).ends), family(name).ends


def test_every_template_is_of_a_family() -> None:
    assert (
        sorted(path.stem for path in FOLDER.iterdir()) == sorted(FAMILIES)
        and len(FAMILIES) >= 40
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_table_is_what_the_template_renders(name: str) -> None:
    check(family(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_are_those_of_the_oracle(name: str) -> None:
    found = {}
    for each, messages in CONVERSATIONS.items():
        calls = any("tool_calls" in message for message in messages)
        if not calls or family(name).tools:
            found[each] = compared(name, messages, functions(family(name)) if calls else None)
    assert {each: said for each, said in found.items() if said != "equal"} == REFUSED.get(
        name, {}
    )


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_tools_that_a_template_leaves_out_are_refused(train_on: str) -> None:
    """The model would learn calls of functions that it has not seen, or that nothing was called."""
    left_out = {
        name for name in FAMILIES if family(name).tools and functions(family(name)) is None
    }
    assert {"deepseek_v3", "llama4"} <= left_out
    for name in left_out:
        with pytest.raises(
            RowError, match="it has tools, but the chat template does not write them"
        ):
            refusing(name, train_on).labelled(
                Example(tuple(CONVERSATIONS["tools"]), tools=FUNCTIONS)
            )
    with pytest.raises(
        RowError, match="it has tool_calls, but the chat template does not write them"
    ):
        refusing("chatml", train_on).labelled(
            Example((user("a"), assistant("b", tool_calls=[CALL])))
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_of_random_conversations_are_those_of_the_oracle(name: str) -> None:
    equal = 0
    for seed in range(8):
        messages, tools = drawn(random.Random(f"{name} {seed}"), family(name))
        said = compared(name, messages, tools, ["assistant", "last"])
        assert said == "equal" or said.startswith(("messages[", "the chat template "))
        equal += said == "equal"
    assert equal >= 7


@pytest.mark.parametrize("name", FAMILIES)
def test_completion_is_what_follows_the_prompt(name: str) -> None:
    known, tokens = family(name), tokens_of(family(name).tokenizer)
    otherwise = set()
    for each in ("one", "three", "blanks", "spelled", "letters", "reasoning", "empty last"):
        messages = CONVERSATIONS[each]
        said, prompt = seen(known, messages), known.render(list(messages[:-1]), prompt=True)
        example = Example(tuple(messages), num_prompt=len(messages) - 1)
        try:
            found = encoder(name, "completion").labelled(example)
        except RowError as error:
            assert error.what in (OTHERWISE, NOTHING)
            assert error.what != OTHERWISE or not said.text.startswith(prompt)
            otherwise.add(error.what)
            continue
        assert said.text.startswith(prompt)
        same(
            f"{name}, {each}",
            tokens,
            found,
            expected(known, tokens, said, "completion", prompt),
        )
    assert (OTHERWISE in otherwise) == (name in PROMPTS_DIFFER)


# The prompt has a beginning of thinking that the answer, without any, is not rendered with.
PROMPTS_DIFFER = ["deepseek_r1_distill", "minimax_m2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_spelled_in_a_text_stay_text(name: str) -> None:
    tokens = tokens_of(family(name).tokenizer)
    made = encoder(name, "all")
    controls = set(tokens.controls.values())
    harmless = made.labelled(Example((user("a"), assistant("b"), user("c"), assistant("d"))))
    for text in (*SPELLED, "".join(FEW[:10])):
        found = made.labelled(
            Example((user(text), assistant(text), user(text), assistant(text)))
        )
        ours, theirs = (
            [id for id in each.ids.tolist() if id in controls] for each in (found, harmless)
        )
        assert ours == theirs
        shown = b"".join(
            b"\0" if id in controls else tokens.bytes_of[id] for id in found.ids.tolist()
        ).decode()
        assert shown.count(text.strip()) == 4


def labelled(
    template: str | ChatTemplate, messages: Any, train_on: str = "assistant", **more: Any
) -> list[str]:
    """The learnt tokens, those that stand together as one text."""
    made = (
        template
        if isinstance(template, ChatTemplate)
        else ChatTemplate(template, {"eos_token": "</s>"}, {})
    )
    backend = more.pop("backend", None) or tokens_of("all").whole
    found = Encoder(backend, 0, made, train_on, lost_texts="count", **more).labelled(
        Example(tuple(messages))
    )
    pieces: list[list[int]] = [[]]
    for id, target in zip(found.ids.tolist(), found.loss_mask.tolist(), strict=True):
        pieces[-1].append(id) if target else pieces.append([])
    return [backend.decode(each, skip_special_tokens=False) for each in pieces if each]


def test_control_token_spelled_in_the_name_of_an_argument_stays_text() -> None:
    calls = "(m.tool_calls|tojson if m.tool_calls else m.content)"
    template = PLAIN.replace("m.content", calls) + ASKS
    said = {**assistant(""), "tool_calls": [{"name": "f", "arguments": {"<|im_end|>": 1}}]}
    (shown,) = labelled(template, (user("a"), said))
    assert shown == '[{"name": "f", "arguments": {"<|im_end|>": 1}}]<|im_end|>'
    made = Encoder(
        tokens_of("all").whole, 0, ChatTemplate(template, {}, {}), "assistant"
    ).labelled(Example((user("a"), said)))
    end = tokens_of("all").controls["<|im_end|>"]
    assert (made.ids == end).sum() == 2, "one for each turn"


TWO = (user("a"), assistant("b c"), user("d"), assistant("e"))
PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def test_added_tokens_that_are_no_control_tokens_are_tokens_in_texts_too() -> None:
    """As <think> and <tool_call> of Qwen: what a model writes as one token is learnt as that, wherever it stands."""
    backend = Tokenizer.from_str(tokens_of("all").whole.to_str())
    backend.add_tokens(
        [AddedToken("<thinking>", special=False), AddedToken("<call>", special=False)]
    )
    thinking, call = (backend.token_to_id(each) for each in ("<thinking>", "<call>"))
    end = backend.token_to_id("<|im_end|>")
    made = replace(encoder("qwen2", "assistant"), backend=backend)
    said = "<thinking>well <|im_end|></thinking><call>"
    found = made.labelled(
        Example(({"role": "user", "content": said}, {"role": "assistant", "content": said}))
    )
    ids, learnt = found.ids.tolist(), found.ids[found.loss_mask].tolist()
    assert (
        ids.count(thinking),
        learnt.count(thinking),
        ids.count(call),
        learnt.count(call),
    ) == (2, 1, 2, 1)
    assert learnt.count(end) == 1 and learnt.index(end) > learnt.index(call), (
        "the one that the template writes"
    )
    texts = VocabularyTokenizer(
        "t", backend, backend.get_vocab_size(), end, "f", control_text=True
    )
    (encoded,) = texts.encode_batch([said])
    assert (
        encoded.tolist().count(thinking) == encoded.tolist().count(call) == 1
        and end not in encoded.tolist()
    )


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        ("{{ messages[0].content // 2 }}", TWO, "the chat template fails: TypeError("),
        ("{{ 1 // 0 }}", TWO, "the chat template fails: ZeroDivisionError("),
        (
            "{{ messages[0].a.b }}",
            TWO,
            "the chat template refuses it: 'dict object' has no attribute 'a'",
        ),
        ("{{ raise_exception('not so') }}", TWO, "the chat template refuses it: not so"),
        ("{{ strftime_now('%Y') }}" + PLAIN, TWO, "the chat template prints today's date"),
        (
            PLAIN + ASKS + "{{ messages[-1].content }}",
            TWO,
            "messages[1]: the chat template does not write the content",
        ),
        (
            "{% for m in messages %}{{ m.role + (m.content | upper if not loop.last else m.content) }}{% endfor %}",
            TWO,
            "messages[1]: the chat template does not write the content once and unchanged",
        ),
        (
            "{% for m in messages %}{{ m.role + m.content | length | string + m.content + ('' if loop.last else ';') }}"
            "{% endfor %}{{ messages | length }}" + ASKS,
            (user("a"), assistant("b"), user("d"), assistant("e")),
            DEPENDS.replace("[3]", "[1]"),
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.role }}{% if m.role == 'tool' and 'tool_calls' not in "
            "messages[loop.index0 - 1] %}{{ raise_exception('no call') }}{% endif %}{{ m.content }}{{ m.tool_calls }}"
            "{% if not loop.last %}{{ loop.length }}{% endif %}{% endfor %}",
            (user("a"), {"role": "assistant", "tool_calls": [CALL]}, RESULT, assistant("b")),
            "messages[1] has only tool calls, and the chat template renders it differently in its place",
        ),
        (
            "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
            TWO,
            "the template marks 1 spans as generated, but there are 2 assistant turns",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% set said %}{% generation %} "
            "{{ m.content }}{% endgeneration %}{% endset %}{{ said | trim }}{% endif %}{% endfor %}",
            TWO,
            "what the template marks as generated cannot be located: the marks are inside text that it changes",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(
    template: str, messages: Any, what: str
) -> None:
    with pytest.raises(RowError) as caught:
        labelled(template, messages)
    assert caught.value.what.startswith(what) and caught.value.expected


def test_marks_inside_a_macro_are_where_they_are_written() -> None:
    said = "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    said += "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    template = said + "{{ '\n' }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
    assert labelled(template, TWO) == ["b c<|im_end|>", "e<|im_end|>"]


def test_head_before_a_first_answer_is_not_learnt_where_it_depends_on_what_follows() -> None:
    said = (assistant("b c"), user("d"), assistant("e"))
    assert labelled("{{ messages | length }} messages\n" + PLAIN + ASKS, said) == [
        "b c<|im_end|>",
        "e<|im_end|>",
    ]


def test_end_token_is_not_the_end_of_the_conversation() -> None:
    template = (
        PLAIN
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    )
    assert labelled(template, TWO) == ["b c<|im_end|>", "e<|im_end|>"]


def test_text_of_the_turn_after_its_mark_does_not_hide_the_end_token() -> None:
    closed = (
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content "
        "}}<|tool_call_end|>{% endgeneration %}<|im_end|>"
    )
    template = (
        "{% for m in messages %}{{ m.role }}:"
        + closed
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert labelled(template, TWO) == [
        "b c<|tool_call_end|><|im_end|>",
        "e<|tool_call_end|><|im_end|>",
    ]


def test_tokenizer_that_trims_places_does_not_move_the_border() -> None:
    trimming = Tokenizer.from_str(tokens_of("all").whole.to_str())
    trimming.post_processor = processors.ByteLevel(trim_offsets=True)
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    # The token " Hello" has the prompt's space in it, and is learnt with the word.
    said = (user("a"), assistant("Hello there"))
    assert (
        labelled(template, said)
        == labelled(template, said, backend=trimming)
        == [" Hello there</s>"]
    )


def test_end_token_that_takes_the_line_end_with_it_is_learnt() -> None:
    greedy = Tokenizer.from_str(tokens_of("text").whole.to_str())
    greedy.add_special_tokens(
        [
            AddedToken("<|im_start|>", special=True),
            AddedToken("<|end|>", special=True, rstrip=True),
        ]
    )
    inside = "{% for m in messages %}{{ m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    inside += "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    assert labelled(inside, TWO, backend=greedy) == ["b c<|end|>", "e<|end|>"]
    plain = PLAIN.replace("im_end", "end") + ASKS
    assert labelled(plain, TWO, backend=greedy) == ["b c<|end|>", "e<|end|>"]


def test_date_is_told_in_the_forms_that_are_written_out() -> None:
    dated = ChatTemplate(
        "\n{{ strftime_now('%d %b %Y') }}\n" + PLAIN, {}, {"date": "2024-07-26"}
    )
    assert dated.render([user("a")]) == "\n26 Jul 2024\n<|im_start|>user\na<|im_end|>\n"
    other = ChatTemplate(
        "{% set form = '%Y' %}{{ strftime_now(form) }}" + PLAIN, {}, {"date": "2024-07-26"}
    )
    with pytest.raises(
        RowError, match="strftime_now is asked for a form that is not written out: %Y"
    ):
        other.render([user("a")])


def test_values_that_are_no_text_beside_the_messages_do_no_harm() -> None:
    dated = [{**message, "at": datetime.date(2024, 7, 26), "weight": 1.5} for message in TWO]
    assert (
        labelled(PLAIN + ASKS, dated)
        == labelled(PLAIN + ASKS, TWO)
        == ["b c<|im_end|>", "e<|im_end|>"]
    )


@pytest.mark.parametrize(
    ("last", "learnt"),
    [("", ["Let me see.<call>look</call>;", "b;"]), ("{{ ' ' if loop.last }}", None)],
)
def test_words_beside_calls_are_learnt_with_them_or_refused(
    last: str, learnt: list[str] | None
) -> None:
    """By a template that counts its messages, and wants a call before each result."""
    template = (
        "{{ messages | length }}{% for m in messages %}{{ m.role }}{% if m.role == 'tool' and not "
        "messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}:{{ m.content }}"
        + last
        + "{% for call in m.tool_calls %}<call>{{ call.function.name }}</call>{% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    said = (user("a"), assistant("Let me see.", tool_calls=[CALL]), RESULT, assistant("b"))
    if learnt is not None:
        assert labelled(template, said) == learnt
        return
    with pytest.raises(
        RowError,
        match=r"messages\[1\]: the chat template renders the tool calls differently in their",
    ):
        labelled(template, said)


def test_end_of_a_turn_is_the_token_that_ends_answers() -> None:
    ends = {
        "phi3": "<|end|>",
        "chatml": "<|im_end|>",
        "gpt_oss": "<|return|>",
        "command_r7b": "<|END_OF_TURN_TOKEN|>",
    }
    for name, end in ends.items():
        wanted = tokens_of(family(name).tokenizer).controls[end]
        assert encoder(name, "last").end_of_turn([user("a")]) == wanted
    assert encoder("glm4", "last").end_of_turn([user("a")]) == 0


OTHER_WAY = "the chat template renders the prompt differently when the completion follows"
BEGUN_BY_THINKING = ("deepseek_r1_distill", "minimax_m2", "exaone4")


@pytest.mark.parametrize("name", FAMILIES)
def test_pair_is_its_two_completions_after_one_prompt(name: str) -> None:
    """Each document is what its answer alone would be; a prompt that is not the same tokens in both is refused."""
    made, asked = encoder(name, "completion"), [user("a"), assistant("b c"), user("d")]
    columns = columns_of(["prompt", "chosen", "rejected"])
    for answers in (
        ("Hello there", "Goodbye"),
        ("yes", "yes, no"),
        (" leading", "\n\n"),
        ("</s> a", "b"),
        (THOUGHT, "😀"),
    ):
        row = dict(
            zip(
                ("prompt", "chosen", "rejected"),
                (asked, *([assistant(each)] for each in answers)),
                strict=True,
            )
        )
        try:
            alone = [
                made.labelled(Example((*asked, assistant(each)), num_prompt=len(asked)))
                for each in answers
            ]
        except RowError as error:
            assert name in BEGUN_BY_THINKING and error.what == OTHER_WAY
            with pytest.raises(RowError, match=OTHER_WAY) as caught:
                labelled_pair(row, columns, made)
            assert caught.value.expected == "a template that renders it the same way"
            continue
        prompts = [each.ids[: each.loss_mask.argmax()].tolist() for each in alone]
        if prompts[0] != prompts[1]:
            assert name in ("gemma2", "gemma3")
            with pytest.raises(
                RowError, match="the prompt has different tokens before the two answers"
            ):
                labelled_pair(row, columns, made)
            continue
        pair = labelled_pair(row, columns, made)
        assert [(each.ids.tolist(), each.loss_mask.tolist()) for each in pair] == [
            (each.ids.tolist(), each.loss_mask.tolist()) for each in alone
        ]


@pytest.mark.parametrize(
    "prompt", ["Question: a Answer:", "Question: a Answer: ", "Question: a Answer:\n"]
)
def test_first_word_of_a_completion_is_learnt_whatever_the_prompt_ends_in(prompt: str) -> None:
    backend = tokens_of("all").whole
    completion = "Hello there" if prompt[-1].isspace() else " Hello there"
    found = Encoder(backend, 0, None, "completion").labelled(
        Example(texts=(prompt, completion))
    )
    learnt = backend.decode(found.ids[found.loss_mask][:-1].tolist())
    assert learnt.strip() == "Hello there"
