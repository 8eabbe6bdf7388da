"""No text of a row is lost in silence: each is in the rendering, or the row is refused by name, or it is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from threefold.commands.data import app
from threefold.data.chat.formats import Example, RowError, columns_of, example_of
from threefold.data.chat.loss_mask import Encoder
from threefold.data.chat.template import ChatTemplate
from threefold.data.store.store import TokenStore
from threefold.data.tokens import byte_backend

END, BYTES = "<|end|>", byte_backend()
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
TURN = "<{{ m.role }}>{{ m.content }}<|end|>"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + ASKS
# The system text is written before the last message, if that is a question: when training it never is.
SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }}<|end|>{% elif m.role == 'assistant' %}"
    + TURN
    + "{% endif %}"
    "{% endfor %}" + ASKS
)
CALLS_ONLY = (
    "{% for m in messages %}{% if m.tool_calls %}<assistant>{% for call in m.tool_calls %}"
    "{{ call.function | tojson }}{% endfor %}<|end|>{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + ASKS
)
THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% if loop.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>{% else %}"
    + TURN
    + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>\n\n</think>\n\n{% endif %}"
)
SPLITS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + ASKS
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}<|end|>{% endfor %}" + ASKS
)
ASKED = {"role": "user", "content": "Rain?"}
SYSTEM = {"role": "system", "content": "You are a pirate."}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "Oslo"}}}
CALLING = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}
RESULT, ANSWER = (
    {"role": "tool", "content": "rain, 12"},
    {"role": "assistant", "content": "It rains."},
)


def thinking(**more: str) -> dict[str, Any]:
    return {**ANSWER, **more}


def encoder(
    source: str, lost_texts: str = "refuse", train_on: str = "assistant", **special: str
) -> Encoder:
    return Encoder(
        BYTES, 256, ChatTemplate(source, special, {}), train_on, lost_texts=lost_texts
    )


def learnt(made: Encoder, *messages: Any) -> list[str]:
    found = made.labelled(Example(messages))
    pieces: list[list[int]] = [[]]
    for id, trained_on in zip(found.ids.tolist(), found.loss_mask.tolist(), strict=True):
        pieces[-1].append(id) if trained_on else pieces.append([])
    return [made.backend.decode(each, skip_special_tokens=False) for each in pieces if each]


LOST: dict[str, tuple[str, tuple[Any, ...], str, str, dict[str, int]]] = {
    "system": (
        SYSTEM_LAST,
        (SYSTEM, ASKED, ANSWER),
        "messages[0] (system): the chat template does not write its content: 'You are a pirate.'",
        "the text at the beginning of the first question, or a chat template that writes it: data.chat_template",
        {"texts of the system": 1},
    ),
    "words beside calls": (
        CALLS_ONLY,
        (ASKED, CALLING, RESULT, ANSWER),
        "messages[1] (assistant): the chat template does not write its words beside the calls: 'Let me look.'",
        "a chat template that writes it: data.chat_template",
        {"words beside calls": 1},
    ),
    "arguments": (
        CALLS_ONLY.replace("call.function | tojson", "call.function.name"),
        (ASKED, {**CALLING, "content": ""}, RESULT, ANSWER),
        "messages[1] (assistant): the chat template does not write its tool_calls: 'Oslo'",
        "a chat template that writes it: data.chat_template",
        {"arguments of calls": 1},
    ),
    "reasoning": (
        PLAIN,
        (ASKED, thinking(reasoning_content="hm")),
        "messages[1] (assistant): the chat template does not write its reasoning_content: 'hm'",
        "a chat template that writes it: data.chat_template",
        {"reasoning": 1},
    ),
    "reasoning in tags": (
        SPLITS,
        (ASKED, thinking(content="<think>\nhm\n</think>\n\nIt rains.")),
        "messages[1] (assistant): the chat template does not write its <think>: 'hm'",
        "a chat template that writes it: data.chat_template",
        {"reasoning": 1},
    ),
    "cut": (
        PLAIN.replace("m.content", "m.content[:8]"),
        (ASKED, {**ANSWER, "content": "It rains in Oslo."}),
        "messages[1] (assistant): the chat template does not write its content: 'It rains in Oslo.'",
        "a chat template that writes it: data.chat_template",
        {"answers": 1},
    ),
}


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize("name", LOST)
def test_lost_text_is_refused_by_name_or_counted(name: str, train_on: str) -> None:
    source, messages, what, expected, counts = LOST[name]
    with pytest.raises(RowError) as raised:
        encoder(source, train_on=train_on).labelled(Example(messages))
    assert raised.value.what == what
    assert (
        raised.value.expected
        == f"{expected}   (or --data.lost_texts count, to train without it)"
    )
    assert encoder(source, "count", train_on).labelled(Example(messages)).lost == counts


def test_text_that_is_elsewhere_too_is_not_taken_for_it() -> None:
    """The system text is also what the user says: only other texts in their places show which of them is written."""
    with pytest.raises(
        RowError,
        match=r"messages\[0\] \(system\): the chat template does not write its content: 'Rain",
    ):
        encoder(SYSTEM_LAST).labelled(Example(({**SYSTEM, "content": "Rain?"}, ASKED, ANSWER)))


def test_reasoning_of_earlier_turns_is_counted() -> None:
    said = (ASKED, thinking(reasoning_content="one"), ASKED, thinking(reasoning_content="two"))
    found = encoder(THINKS).labelled(Example(said))
    assert found.lost == {"reasoning of earlier turns": 1}


def test_reasoning_of_the_last_turn_is_trained_on() -> None:
    """Although the model would by default be asked not to reason, and its prompt says so."""
    said = (ASKED, thinking(reasoning_content="two and two"))
    assert learnt(encoder(THINKS), *said) == ["two and two\n</think>\n\nIt rains.<|end|>"]
    # With more of the prompt in common, what is reasoned is all learnt.
    assert learnt(encoder(THINKS), ASKED, thinking(reasoning_content="</think>")) == [
        "</think>\n</think>\n\nIt rains.<|end|>"
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_key_that_is_written_is_no_loss(key: str) -> None:
    assert learnt(encoder(THINKS), ASKED, thinking(**{key: "hm"})) == [
        "hm\n</think>\n\nIt rains.<|end|>"
    ]


def test_reasoning_under_two_keys_is_one_text() -> None:
    said = (ASKED, thinking(reasoning_content="hm", reasoning="hm"))
    assert learnt(encoder(THINKS), *said) == ["hm\n</think>\n\nIt rains.<|end|>"]


def test_reasoning_that_says_what_the_answer_says_is_a_text_of_its_own() -> None:
    with pytest.raises(RowError, match=r"does not write its reasoning_content: 'It rains\.'"):
        encoder(PLAIN).labelled(Example((ASKED, thinking(reasoning_content="It rains."))))


def test_template_of_lists_gets_lists() -> None:
    assert learnt(encoder(PARTS), SYSTEM, ASKED, ANSWER) == ["It rains.<|end|>"]


@pytest.mark.parametrize("form", ["is none", "is not defined", "== ''"])
def test_calls_without_content_are_as_the_template_asks_for_them(form: str) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m['content'] FORM %}<assistant>{% for call in "
        "m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|end|>{% else %}<{{ m.role }}>"
        "{{ m['content'] + '' }}<|end|>{% endif %}{% endfor %}" + ASKS
    )
    said = (ASKED, {"role": "assistant", "tool_calls": [CALL]}, RESULT, ANSWER)
    called = '{"name": "look", "arguments": {"place": "Oslo"}}<|end|>'
    assert learnt(encoder(source.replace("FORM", form)), *said) == [called, "It rains.<|end|>"]


def test_switches_of_the_template_are_no_texts() -> None:
    """A system text may hold /no_think, which a template reads and does not write."""
    source = "{% set ns = namespace(short=false) %}" + PLAIN.replace(
        "m.content", "m.content.replace('/no_think', '')"
    )
    said = ({**SYSTEM, "content": "Be kind. /no_think"}, ASKED, ANSWER)
    assert encoder(source).labelled(Example(said)).lost == {}


def test_keys_that_nothing_reads_are_named_and_not_refused() -> None:
    """A template may read any key of a message; what it does not read was perhaps meant to be read."""
    source = PLAIN.replace("<{{ m.role }}>", "<{{ m.role }}>{{ m.mood or '' }}")
    said = ({**ASKED, "mood": "calm "}, {**ANSWER, "grade": "good", "tokens": 3, "name": "bot"})
    found = encoder(source).labelled(Example(said))
    assert found.lost == {"texts of the unknown key 'grade'": 1}


def test_function_call_of_sharegpt_is_a_call() -> None:
    rows = columns_of(["conversations"])
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    said = [
        {"from": "human", "value": "Rain?"},
        call,
        {"from": "observation", "value": "rain, 12"},
    ]
    example = example_of(
        {"conversations": [*said, {"from": "gpt", "value": "It rains."}]}, rows
    )
    assert example.messages == (
        ASKED,
        {"role": "assistant", "tool_calls": [CALL]},
        RESULT,
        ANSWER,
    )
    with pytest.raises(
        RowError, match=r"conversations\[0\]: a function_call that is not a call"
    ):
        example_of({"conversations": [{**call, "value": "look()"}]}, rows)


MARKED = "{% generation %}{{ m.content }}<|end|>\n{% endgeneration %}"
EVERY_END = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    + MARKED
    + "{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% else %}{% generation %}{{ eos_token }}"
    "{% endgeneration %}{% endif %}"
)
TWO_MARKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% if m.reasoning_content %}{% generation %}"
    "<think>{{ m.reasoning_content }}</think>{% endgeneration %}\n\n{% endif %}"
    + MARKED
    + "{% else %}{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}" + ASKS
)


@pytest.mark.parametrize(
    ("source", "train_on", "wanted"),
    [
        (EVERY_END, "assistant", ["It rains.<|end|>", "It rains.<|end|>", "<|end|>"]),
        (EVERY_END, "last", ["It rains.<|end|>", "<|end|>"]),
        (TWO_MARKS, "assistant", ["It rains.<|end|>", "<think>hm</think>", "It rains.<|end|>"]),
        (TWO_MARKS, "last", ["<think>hm</think>", "It rains.<|end|>"]),
    ],
)
def test_every_mark_of_a_turn_is_followed(
    source: str, train_on: str, wanted: list[str]
) -> None:
    said = (ASKED, ANSWER, {**ASKED, "content": "And now?"}, thinking(reasoning_content="hm"))
    said = said if source == TWO_MARKS else (*said[:3], ANSWER)
    assert learnt(encoder(source, train_on=train_on, eos_token=END), *said) == wanted


# Turns without an end of their own; and an end that is written with the message after it.
HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% else %}<|end|>{% endif %}"
)
LATER_ENDS = (
    "{% for m in messages %}{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}<|end|>{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (HEADERS, ["It rains.", "It rains.<|end|>"]),
        (LATER_ENDS, ["It rains.<|end|>", "It rains."]),
    ],
)
def test_header_of_the_next_turn_is_no_end(source: str, wanted: list[str]) -> None:
    backend = Tokenizer.from_str(BYTES.to_str())
    roles = ("system", "user", "assistant", "tool")
    backend.add_special_tokens([AddedToken(f"<|{role}|>", special=True) for role in roles])
    made = replace(encoder(source), backend=backend)
    assert learnt(made, ASKED, ANSWER, ASKED, ANSWER) == wanted


def test_first_word_of_an_answer_is_trained_on_with_the_space_before_it() -> None:
    """The template's space and the word are one token, which no model would learn to write otherwise."""
    words = Tokenizer(
        models.WordLevel(
            {"USER:": 0, "ASSISTANT:": 1, " Rain?": 2, " It": 3, " rains.": 4, "</s>": 5}
        )
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^ ]+"), "isolated")
    words.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    source = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}</s>{% endfor %}"
    made = replace(
        encoder(source + "{% if add_generation_prompt %}ASSISTANT: {% endif %}"), backend=words
    )
    found = made.labelled(Example((ASKED, ANSWER)))
    assert found.ids[found.loss_mask].tolist() == [3, 4, 5]


def test_renderers_own_parameters_are_no_variables_of_a_row() -> None:
    with pytest.raises(
        RowError, match="'continue_final_message', which is not a template variable"
    ):
        encoder(PLAIN).labelled(
            Example((ASKED, ANSWER), variables={"continue_final_message": True})
        )


def test_head_and_show_say_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text(SYSTEM_LAST)
    rows = [{"messages": [*([SYSTEM] if number else []), ASKED, ANSWER]} for number in range(3)]
    Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = (
        "--data.source",
        "c.jsonl",
        "--data.tokenizer",
        "bytes",
        "--data.chat_template",
        "t.jinja",
    )
    refused = CliRunner().invoke(app, ["show", *named]).exception
    assert (
        "c.jsonl, line 2: messages[0] (system): the chat template does not write its content"
        in str(refused)
    )
    counted = CliRunner().invoke(app, ["show", *named, "--data.lost_texts", "count"]).stdout
    lost = "not written by the chat template: 1 texts of the system"
    assert (
        "row 0: 33 tokens, 10 trained on\n" in counted
        and f"row 1: 33 tokens, 10 trained on; {lost}" in counted
    )
    CliRunner().invoke(app, ["prepare", *named, "--data.lost_texts", "count", "--to", "store"])
    info = TokenStore(Path("store/tokens")).info
    assert info is not None and info.lost_texts == {"texts of the system": 2}
    assert info.mask_summary.endswith(
        "; not written by the chat template: 2 texts of the system"
    )


def row_shown(
    messages: Any, template: str, *options: str, **more: Any
) -> tuple[dict[str, Any], list[str]]:
    """What `data show` says of a row, as JSON and as lines."""
    Path("t.jinja").write_text(template)
    Path("c.jsonl").write_text(json.dumps({"messages": messages, **more}) + "\n")
    named = (
        "show",
        "--data.source",
        "c.jsonl",
        "--data.tokenizer",
        "bytes",
        "--data.chat_template",
        "t.jinja",
    )
    results = [
        CliRunner().invoke(app, [*named, *options, *form])
        for form in (["--json"], ["--row", "0"])
    ]
    assert [each.exit_code for each in results] == [0, 0], [each.output for each in results]
    return json.loads(results[0].stdout), results[1].stdout.splitlines()


def test_shown_row_names_each_text_and_why_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template leaves out the system text, what a tool gave, the tools and earlier reasoning."""
    monkeypatch.chdir(tmp_path)
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% if loop.last %}{{ m.reasoning_content }}"
        "{% endif %}{{ m.content }}<|end|>{% elif m.role == 'user' %}"
        + TURN
        + "{% endif %}{% endfor %}"
        + ASKS
    )
    said = [
        SYSTEM,
        ASKED,
        thinking(reasoning_content="one"),
        RESULT,
        ASKED,
        thinking(reasoning_content="two"),
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    row, lines = row_shown(said, template, "--data.lost_texts", "count", tools=tools)
    names = ("message", "kind", "in_rendering", "reason")
    assert {tuple(each[name] for name in names) for each in row["texts"]} == {
        (0, "content", False, "template"),
        (1, "content", True, None),
        (2, "content", True, None),
        (2, "reasoning_content", False, "template"),
        (3, "content", False, "template"),
        (4, "content", True, None),
        (5, "content", True, None),
        (5, "reasoning_content", True, None),
        (None, "tools", False, "template"),
    }
    assert len(row["texts"]) == 9 and {each["document"] for each in row["texts"]} == {0}
    assert sorted(line for line in lines if line.startswith("  lost")) == [
        "  lost, template: messages[0] (system): content: 'You are a pirate.'",
        "  lost, template: messages[2] (assistant): reasoning_content: 'one'",
        "  lost, template: messages[3] (tool): content: 'rain, 12'",
        "  lost, template: tools",
    ]


def test_shown_texts_have_their_control_tokens_spelled_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked, answer = "Say <|end|> twice.", "<|end|><|end|>"
    row, _ = row_shown(
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], PLAIN
    )
    assert [each["text"] for each in row["texts"]] == [asked, answer]
