"""A conversation rendered by a transformers chat template (jinja), with the character spans of its assistant turns.

A span marked by `{% generation %}` is used as it is; otherwise the spans are found by rendering variants of the
conversation, or the row is refused.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import accumulate
from typing import Any

from threefold.data.chat.assistant_spans import Turn, Whole
from threefold.data.chat.formats import Message, Messages, RowError, with_arguments
from threefold.data.chat.row_texts import RowTexts
from threefold.jsonl import Values

_GENERATION, _END = (
    re.compile(rf"\{{%([-+]?)\s*{name}\s*([-+]?)%\}}")
    for name in ("generation", "endgeneration")
)
# Characters that occur in no text: they mark the start and end of a span.
_OPEN_CLOSE = "\ufdd0\ufdd1"
_BORDER = re.compile(f"[{_OPEN_CLOSE}]")
# Parameters of what renders, which would change more than what the template reads.
_RENDERERS = {
    "conversations",
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
}
_RENDERERS |= {"return_assistant_tokens_mask"}
Tools = Sequence[Any] | None
Variables = Mapping[str, Any] | None
# A text that no template writes by itself.
_WORD = "Aqx"
_DATE = re.compile(r"\bstrftime_now\b")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens that it names.

    Args:
        source: the template, in jinja.
        special: the tokenizer's special tokens by name: bos_token, eos_token, ...
        variables: other variables of the template; `date` is what a template that prints today's date prints.
    """

    source: str
    special: Mapping[str, str]
    variables: Values

    @property
    def today(self) -> str | None:
        """The date that a template prints as today's; None: a template that does is refused."""
        return str(self.variables["date"]) if "date" in self.variables else None

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template itself marks what the assistant writes."""
        return _GENERATION.search(self.source) is not None

    @cached_property
    def prints_date(self) -> bool:
        """Whether the template asks for the date."""
        return _DATE.search(self.source) is not None

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        variables: Variables = None,
        prompt: bool = False,
    ) -> str:
        """The text of a conversation; with `prompt`, up to where the assistant would begin to write.

        Raises:
            RowError: the template refuses the conversation, or fails on it.
        """
        if self.prints_date and self.today is None:
            raise RowError(
                "the chat template prints today's date",
                "one date for all rows: data.template_variables",
            )
        if taken := sorted(_RENDERERS & {*self.variables, *(variables or {})}):
            raise RowError(
                f"chat_template_kwargs or data.template_variables has {taken[0]!r}, which "
                "is not a template variable",
                f"variables of the template, without {', '.join(taken)}",
            )
        return self._rendered(
            [self._as_taken(message) for message in messages],
            tools,
            variables or {},
            prompt=prompt,
        )

    def _rendered(
        self, messages: Messages, tools: Tools, variables: Values, *, prompt: bool
    ) -> str:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, _ = render_jinja_template(
                [list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self._dated,
                add_generation_prompt=prompt,
                **{**self.special, **self.variables, **variables},
            )
        except TemplateError as error:
            raise RowError(
                f"the chat template refuses it: {error}",
                "a conversation that the template accepts   (its variables: data.template_variables)",
            ) from None
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise RowError(
                f"the chat template fails: {error!r}", "messages that the template accepts"
            ) from None
        return str(texts[0])

    def _as_taken(self, message: Message) -> Message:
        """A message in the form that the template takes."""
        taken = (
            {**self._without_content, **message} if message.get("tool_calls") else dict(message)
        )
        if self._takes_text and isinstance(calls := taken.get("tool_calls"), list):
            taken["tool_calls"] = [_as_text(call) for call in calls]
        content = taken.get("content")
        return (
            {**taken, "content": [{"type": "text", "text": content}]}
            if self._takes_parts and isinstance(content, str)
            else taken
        )

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes a content that is a list of parts, and not one that is a text."""
        return not self._writes([{"role": "user", "content": _WORD}]) and self._writes(
            [{"role": "user", "content": [{"type": "text", "text": _WORD}]}]
        )

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes arguments of calls that are text, but not an object."""
        question = {"role": "user", "content": "-"}
        call = {
            "id": "call00001",
            "type": "function",
            "function": {"name": "-", "arguments": {"-": _WORD}},
        }
        as_object, as_text = (
            {"role": "assistant", **self._without_content, "tool_calls": [each]}
            for each in (call, _as_text(call))
        )
        return not self._writes([question, as_object]) and self._writes([question, as_text])

    @cached_property
    def _without_content(self) -> Values:
        """Variants of a message with only calls: no content, null or an empty text, so that its calls are written."""
        calls = [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": _WORD, "arguments": {}},
            }
        ]
        question = {"role": "user", "content": "-"}
        for content in ({}, {"content": None}, {"content": ""}):
            if any(
                self._writes([question, {"role": "assistant", **content, "tool_calls": each}])
                for each in (calls, [_as_text(calls[0])])
            ):
                return content
        return {}

    def _writes(self, messages: Messages) -> bool:
        """Whether the word of a probe comes out, as messages are, whatever their form."""
        try:
            return _WORD in self._rendered(messages, None, {}, prompt=False)
        except RowError:
            return False

    @cached_property
    def bordered(self) -> "ChatTemplate":
        """The template, which writes a border where it has a mark."""
        source = self.source
        for mark, border in zip((_GENERATION, _END), _OPEN_CLOSE, strict=True):
            source = mark.sub(
                f"{{%\\1 if true -%}}{{{{ '{border}' }}}}{{%- endif \\2%}}", source
            )
        return replace(self, source=source)

    @cached_property
    def _dated(self) -> str:
        """The template, with `today` where it asks for the date."""
        if self.today is None or not self.prints_date:
            return self.source
        day = date.fromisoformat(self.today)
        forms = set(re.findall(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", self.source))
        dates = ", ".join(
            f"{quote}{form}{quote}: {day.strftime(form)!r}" for quote, form in sorted(forms)
        )
        unknown = "raise_exception('strftime_now is asked for a form that is not written out: ' ~ form)"
        lookup = f"{{{{- {{{dates}}}[form] if form in {{{dates}}} else {unknown} -}}}}"
        return f"{{%- macro strftime_now(form) -%}}{lookup}{{%- endmacro +%}}{self.source}"


@dataclass(frozen=True)
class Conversation:
    """Messages as a template writes them, with the tools and variables of their row."""

    template: ChatTemplate
    messages: Messages
    tools: Tools = None
    variables: Variables = None
    _known: dict[str, str] = field(default_factory=dict, init=False)

    def render(self, messages: Messages, *, prompt: bool = False) -> str:
        """As `ChatTemplate.render`, other messages of this row; what was rendered before is known."""
        key = repr((prompt, messages))
        if key not in self._known:
            self._known[key] = self.template.render(
                messages, tools=self.tools, variables=self.variables, prompt=prompt
            )
        return self._known[key]

    @cached_property
    def texts(self) -> RowTexts:
        """Its texts, and where they are in its rendering; a RowError as for `render`."""
        return RowTexts(self.messages, self.render(self.messages), self.render)

    def unwritten(self) -> list[str]:
        """`tools`, `tool_calls`: which of them the template leaves out, so that the model would not see any of them."""
        others = {"tools": replace(self, tools=None)} if self.tools else {}
        if any(each.get("tool_calls") for each in self.messages):
            calls = [
                {"content": "", **{k: v for k, v in each.items() if k != "tool_calls"}}
                for each in self.messages
            ]
            others["tool_calls"] = replace(self, messages=calls)
        unwritten = []
        for what, bare in others.items():
            with contextlib.suppress(RowError):  # it refuses to render without them
                if bare.texts.text == self.texts.text:
                    unwritten.append(what)
        return unwritten

    def turns(self) -> tuple[Turn, ...]:
        """All turns of the assistant.

        Raises:
            RowError: as `render`, or a turn cannot be separated from what is around it.
        """
        if self.template.marks_generation:
            return self._whole.all_marked(self._marks(self.messages), self.texts)
        turns = [
            self._whole.turn(number)
            for number, message in enumerate(self.messages)
            if message["role"] == "assistant"
        ]
        return self._whole.checked(turns, self.texts)

    def completion(self, num_prompt: int) -> Turn:
        """What follows the first `num_prompt` messages, all of which is the assistant's.

        Raises:
            RowError: as `render`, or the prompt is rendered in another way when the completion follows.
        """
        text, prompt = self.texts.text, self.render(self.messages[:num_prompt], prompt=True)
        if not text.startswith(prompt):
            raise RowError(
                "the chat template renders the prompt differently when the completion follows",
                "a template that renders it the same way",
                train_on="assistant",
            )
        return self._whole.closed(Turn(len(prompt), len(text), len(self.messages) - 1))

    @cached_property
    def _whole(self) -> Whole:
        return Whole(list(self.messages), self.texts.text, self.render, self._after_mark)

    def _after_mark(self, messages: Messages) -> str:
        marked = self._marks(messages)
        return self.render(messages)[marked[-1][1] :] if marked else ""

    def _marks(self, messages: Messages) -> list[tuple[int, int]]:
        """The spans marked by the template, found by rendering it with a character in place of each mark."""
        shown = replace(self, template=self.template.bordered).render(messages)
        pieces = _BORDER.split(shown)
        if (
            "".join(pieces) != self.render(messages)
            or len(pieces) % 2 == 0
            or "".join(_BORDER.findall(shown)) != _OPEN_CLOSE * (len(pieces) // 2)
        ):
            raise RowError(
                "what the template marks as generated cannot be located: the marks are inside text that it changes",
                "{% generation %} around text that is written unchanged",
            )
        places = [0, *accumulate(map(len, pieces))]
        return list(zip(places[1::2], places[2::2], strict=False))


def _as_text(call: Any) -> Any:
    """A call whose arguments are the JSON of what they are."""
    return with_arguments(
        call,
        lambda each: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False),
    )
