"""Random chat templates and rows, and what is known of them by how they were made: none of the code that they check.

Every text of a row has words that are in no other text, and every header, mark and end of a template is one that no
text has. So where a text, a header or an end is in a rendering is seen by a search for it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

ROLES = ("system", "user", "assistant", "tool")
BOS, END, EOS = "<|bos|>", "<|end|>", "<|eos|>"
# What stands before the text of a role.
HEADERS = {
    "control": "<|{}|>",
    "line": "<|{}|>\n",
    "started": "<|start|>{}\n",
    "words": "[{}]: ",
    "titles": "### The {}:\n",
}
CONTROLS = [BOS, END, EOS, "<|start|>", "<|call|>", *(f"<|{role}|>" for role in ROLES)]
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "toolsxq", "parameters": {}},
    }
]
Message = dict[str, Any]


@dataclass(frozen=True)
class Template:
    """A template and the choices that it was made of."""

    source: str
    header: str
    end: str
    choices: dict[str, Any]

    def render(self, messages: Sequence[Message], tools: Any = None) -> str:
        """As transformers renders it; its errors are raised."""
        texts, _ = render_jinja_template(
            [[dict(each) for each in messages]],
            tools=tools,
            chat_template=self.source,
            bos_token=BOS,
            eos_token=EOS,
        )
        return str(texts[0])


def template(draw: random.Random) -> Template:
    """A template by chance: mostly one that writes all texts."""
    pick = draw.choice
    header = HEADERS[pick(list(HEADERS))]
    chosen = {
        "bos": pick(["", BOS]),
        "end": pick([END, END, END + "\n", "", EOS]),
        "trim": pick(["", "", " | trim"]),
        "system": pick(["own", "own", "own", "first", "first", "default", "dropped", "last"]),
        "key": pick(["reasoning_content", "reasoning_content", "thinking", None]),
        "kept": pick(["all", "last", "last", "asked"]),
        "opens": pick(["", "", "<think>\n", "<think>\n\n</think>\n\n"]),
        "strips": pick([False, False, "earlier"]),
        "calls": pick(["after", "after", "before", "alone", "dropped"]),
        "results": pick(["own", "own", "user", "inside"]),
        "marks": pick(["", "", "", "text", "turn", "parts", "ends"]),
        "last": pick(["", "", EOS]),
        "later": False,
    }
    if chosen["end"] == "" and draw.random() < 0.5:
        chosen["later"] = True  # an end that is written with the message after it
    return Template(_source(header, chosen), header, chosen["end"], chosen)


def _source(header: str, chosen: dict[str, Any]) -> str:
    trim, end, marks = chosen["trim"], chosen["end"], chosen["marks"]
    begin, close = ("{%- generation -%}", "{%- endgeneration -%}") if marks else ("", "")

    def shown(role: str) -> str:
        return _quoted(header.format(role))

    folded = {"first": "loop.index0 == ns.first", "last": "loop.last"}.get(chosen["system"])
    system = (
        f"{{%- if {folded} and ns.system -%}}{{{{ ns.system + '\\n\\n' }}}}{{%- endif -%}}"
        if folded
        else ""
    )
    user = f"{{{{ {shown('user')} }}}}{system}{{{{ message.content{trim} }}}}{{{{ {_quoted(end)} }}}}"
    parts = []
    key = chosen["key"]
    if key is not None:
        when = {"all": "true", "last": "loop.last", "asked": "loop.index0 > ns.asked"}[
            chosen["kept"]
        ]
        thought = f"{{{{ '<think>\\n' + message.{key}{trim} + '\\n</think>\\n\\n' }}}}"
        thought = begin + thought + close if marks == "parts" else thought
        empty = (
            "{{ '<think>\\n\\n</think>\\n\\n' }}" if chosen["opens"].endswith("\n\n") else ""
        )
        parts.append(
            f"{{%- if message.{key} and {when} -%}}{thought}{{%- else -%}}{empty}{{%- endif -%}}"
        )
    content = f"{{{{ message.content{trim} }}}}"
    if chosen["strips"]:
        after = f"{{{{ message.content.split('</think>')[-1]{trim} }}}}"
        content = f"{{%- if loop.last -%}}{content}{{%- else -%}}{after}{{%- endif -%}}"
    content = begin + content + close if marks in ("text", "parts") else content
    inside = "{{ '<result>' + other.content + '</result>' }}"
    inside = f"{{%- for other in messages if other.role == 'tool' -%}}{inside}{{%- endfor -%}}"
    inside = inside if chosen["results"] == "inside" else ""
    call = "{%- for call in message.tool_calls or [] -%}"
    call += "{{ '<|call|>' + call.function.name + ' ' + (call.function.arguments | tojson) }}"
    call += f"{{%- endfor -%}}{{%- if message.tool_calls -%}}{inside}{{%- endif -%}}"
    call = begin + call + close if marks == "parts" else call
    parts += {
        "after": [content, call],
        "before": [call, content],
        "alone": [
            "{%- if message.tool_calls -%}",
            call,
            "{%- else -%}",
            content,
            "{%- endif -%}",
        ],
        "dropped": [content],
    }[chosen["calls"]]
    ends = f"{{{{ {_quoted(end)} }}}}" if end else ""
    turn = "".join(parts)
    if marks == "turn":
        turn = begin + turn + ends + close
    elif marks == "ends":
        turn = begin + turn + close + (begin + ends + close if ends else "")
    else:
        turn += ends
    assistant = f"{{{{ {shown('assistant')} }}}}{turn}"
    result = {
        "own": f"{{{{ {shown('tool')} + message.content }}}}{{{{ {_quoted(end)} }}}}",
        "user": f"{{{{ {shown('user')} + '<result>' + message.content + '</result>' }}}}{{{{ {_quoted(end)} }}}}",
        "inside": "",
    }[chosen["results"]]
    own = f"{{{{ {shown('system')} + message.content{trim} }}}}{{{{ {_quoted(end)} }}}}"
    before = "messages[loop.index0 - 1].role == 'assistant'"
    later = f"{{%- if not loop.first and {before} -%}}{{{{ '{END}' }}}}{{%- endif -%}}"
    default = f"{{{{ {shown('system')} + 'Be useful.' }}}}{{{{ {_quoted(end)} }}}}"
    default = f"{{%- if messages[0].role != 'system' -%}}{default}{{%- endif -%}}"
    return (
        f"{{{{- '{chosen['bos']}' -}}}}"
        "{%- set ns = namespace(system='', first=0, asked=-1) -%}{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}{%- set ns.system = message.content -%}"
        "{%- set ns.first = loop.index0 + 1 -%}"
        "{%- elif message.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}"
        + (default if chosen["system"] == "default" else "")
        + "{%- if tools -%}{{- '<tools>' + (tools | tojson) + '</tools>' -}}{%- endif -%}"
        + "{%- for message in messages -%}"
        + (later if chosen["later"] else "")
        + f"{{%- if message.role == 'system' -%}}{own if chosen['system'] in ('own', 'default') else ''}"
        + f"{{%- elif message.role == 'user' -%}}{user}{{%- elif message.role == 'tool' -%}}{result}"
        + f"{{%- else -%}}{assistant}{{%- endif -%}}{{%- endfor -%}}"
        + f"{{%- if add_generation_prompt -%}}{{{{ {shown('assistant')} + {_quoted(chosen['opens'])} }}}}"
        + (f"{{%- else -%}}{{{{ '{chosen['last']}' }}}}" if chosen["last"] else "")
        + "{%- endif -%}"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("\n", "\\n") + "'"


@dataclass
class Row:
    """A conversation; `texts`: (message, key, text) of each text that it has, which no other has."""

    messages: list[Message]
    tools: Any
    texts: list[tuple[int, str, str]] = field(default_factory=list)


def row(draw: random.Random) -> Row:
    """A conversation by chance."""
    made = Row([], None)
    count = iter(range(1000))

    def text(key: str, message: int | None = None) -> str:
        number = next(count)
        core = draw.choice(
            ["w{0}q", "w{0}q and z{0}q", "w{0}q:\nz{0}q", "(w{0}q) é z{0}q!"]
        ).format(number)
        made.texts.append((len(made.messages) if message is None else message, key, core))
        return draw.choice(["{}", "{}", "{}", " {}", "{}\n", "\n{} "]).format(core)

    if draw.random() < 0.3:
        made.messages.append({"role": "system", "content": text("content")})
    for _ in range(draw.randint(1, 3)):
        made.messages.append({"role": "user", "content": text("content")})
        if draw.random() < 0.25:
            made.tools = _TOOLS
            said: Message = {"role": "assistant"}
            said["content"] = text("content") if draw.random() < 0.5 else ""
            if draw.random() < 0.2:
                said["reasoning_content"] = text("reasoning_content")
            place = f"w{next(count)}q"
            made.texts.append((len(made.messages), "tool_calls", place))
            said["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": "look", "arguments": {"place": place}},
                }
            ]
            made.messages.append(said)
            made.messages.append({"role": "tool", "content": text("content")})
        answer: Message = {"role": "assistant"}
        if draw.random() < 0.2:
            answer["reasoning_content"] = text("reasoning_content")
        if draw.random() < 0.1:
            answer["content"] = f"<think>\n{text('thoughts')}\n</think>\n\n{text('content')}"
        else:
            answer["content"] = text("content")
        made.messages.append(answer)
    if draw.random() < 0.1:
        made.messages.append({"role": "user", "content": text("content")})
    return made


def places(rendered: str, core: str) -> list[tuple[int, int]]:
    """Where a text is in a rendering: as it is, or as JSON writes it."""
    forms = {core, json.dumps(core, ensure_ascii=False)[1:-1]}
    return [found.span() for form in forms for found in re.finditer(re.escape(form), rendered)]


def violations(made: Template, said: Row, rendered: str, learnt: Sequence[bool]) -> list[str]:
    """What is wrong with the characters that are trained on: another's, a header's, or not all of the assistant's."""
    wrong = []
    unmarked = bool(made.choices["marks"])
    for message, key, core in said.texts:
        for begin, end in places(rendered, core):
            if said.messages[message]["role"] != "assistant":
                if any(learnt[begin:end]):
                    wrong.append(f"learns messages[{message}]: {core!r}")
            elif not all(learnt[begin:end]) and not (unmarked and key != "content"):
                wrong.append(f"does not learn {key} of messages[{message}]: {core!r}")
    for role in ROLES:
        header = made.header.format(role)
        at = [found.span() for found in re.finditer(re.escape(header), rendered)]
        wrong += [
            f"learns the header {header!r} at {begin}"
            for begin, end in at
            if any(learnt[begin:end])
        ]
    wrong += _ends(made, said, rendered, learnt)
    return wrong


def _ends(made: Template, said: Row, rendered: str, learnt: Sequence[bool]) -> list[str]:
    """An end token that the template writes after an answer is learnt, and no other."""
    wrong = []
    end = made.end.strip()
    texts = sorted(
        (begin, stop, message)
        for message, _, core in said.texts
        for begin, stop in places(rendered, core)
    )
    for found in re.finditer(re.escape(end), rendered) if end else ():
        before = [message for begin, stop, message in texts if stop <= found.start()]
        # After calls that are not marked, and results inside a turn, it is the template's choice.
        if before and not (
            said.tools
            and (made.choices["marks"] == "text" or made.choices["results"] == "inside")
        ):
            ours = said.messages[before[-1]]["role"] == "assistant"
            if ours != all(learnt[found.start() : found.end()]) and made.choices["last"] != end:
                wrong.append(
                    f"{'does not learn' if ours else 'learns'} the end at {found.start()}"
                )
    return wrong


def lost(made: Template, said: Row, rendered: str) -> list[tuple[int, str, str]]:
    """The texts of a row that are not in its rendering; and the tools, as (-1, "tools", "")."""
    missing = [text for text in said.texts if not places(rendered, text[2])]
    return missing + ([(-1, "tools", "")] if said.tools and "toolsxq" not in rendered else [])
