"""What another than the assistant said is never trained on: a template that writes it inside a turn is refused."""

from __future__ import annotations

from typing import Any

import pytest

from threefold.data.chat.formats import RowError
from threefold.data.chat.template import ChatTemplate, Conversation

# The call, then the results that follow in the conversation, then the words beside the call: one turn of the model.
CALLS = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}<model>"
    "{%- for call in message.tool_calls or [] -%}<call>{{ call.function.name }}</call>"
    "{%- for other in messages[messages.index(message) + 1:] if other.role == 'tool' -%}"
    "<result>RESULT</result>{%- endfor -%}{%- endfor -%}"
    "{{ message.content or '' }}<end>{%- elif message.role != 'tool' -%}"
    "<{{ message.role }}>{{ message.content }}<end>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<model>{%- endif -%}"
)
FORMS = {
    "plain": "{{ other.content }}",
    "quoted": "value:{{ other.content | tojson }}",
    "trimmed": "{{ other.content | trim }}",
}
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
ASKED, ANSWERED = (
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "It rains, 12 degrees."},
)
RESULT = {"role": "tool", "content": "rain\n12 degrees"}


def calling(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [CALL]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("marked", [False, True])
def test_result_of_a_tool_inside_a_turn_is_refused(form: str, marked: bool) -> None:
    source = CALLS.replace("RESULT", FORMS[form])
    if marked:
        source = source.replace("<model>{%- for", "<model>{% generation %}{%- for").replace(
            "{{ message.content or '' }}<end>",
            "{{ message.content or '' }}<end>{% endgeneration %}",
        )
    template = ChatTemplate(source, {}, {})
    with pytest.raises(RowError) as raised:
        Conversation(template, [ASKED, calling("Let me look."), RESULT, ANSWERED]).turns()
    assert raised.value.what.startswith(
        "messages[2]: the chat template writes it inside messages[1], a turn of the"
    )
    assert raised.value.what.endswith("so text of the tool would be trained on")


def test_answer_that_repeats_what_was_said_is_its_own() -> None:
    """Neither a result that is quoted nor a question that is repeated makes a turn another's."""
    source = (
        "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}<end>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
    )
    talk = [
        ASKED,
        {"role": "assistant", "content": "Rain? rain\n12 degrees"},
        RESULT,
        {**ANSWERED, "content": "rain\n12 degrees"},
    ]
    shown = Conversation(ChatTemplate(source, {}, {}), talk)
    assert [shown.texts.text[turn.begin : turn.end] for turn in shown.turns()] == [
        "Rain? rain\n12 degrees<end>",
        "rain\n12 degrees<end>",
    ]
