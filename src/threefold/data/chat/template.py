"""A conversation rendered by a transformers chat template (jinja), with the character spans of its assistant turns.

A span marked by `{% generation %}` is used as it is; otherwise the spans are found by rendering variants of the
conversation, or the row is refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from threefold.data.chat.assistant_spans import Turn, Whole
from threefold.data.chat.formats import Message, Messages, RowError
from threefold.data.chat.row_texts import RowTexts

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
class Rendered:
    """A conversation as text, with the turns of its assistant."""

    text: str
    turns: tuple[Turn, ...]


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
    variables: Mapping[str, Any]

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
        self, messages: Messages, tools: Tools, variables: Mapping[str, Any], *, prompt: bool
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

    def rendered(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        variables: Variables = None,
        texts: RowTexts | None = None,
    ) -> Rendered:
        """A conversation's text with all its assistant turns.

        Raises:
            RowError: as `render`, or a turn cannot be separated from what is around it.
        """
        texts = texts or self.texts(messages, tools=tools, variables=variables)
        turns = [
            number for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        whole = self._whole(messages, tools, variables, texts.text)
        if not self.marks_generation:
            return Rendered(
                texts.text, whole.checked([whole.turn(number) for number in turns], texts)
            )
        return Rendered(
            texts.text,
            whole.all_marked(self._marks(messages, tools, variables, texts.text), texts),
        )

    def texts(self, messages: Messages, *, tools: Tools, variables: Variables) -> RowTexts:
        """The texts of a conversation, and where they are in its rendering; a RowError as for `render`."""
        renders = partial(self.render, tools=tools, variables=variables)
        return RowTexts(messages, renders(messages), renders)

    def unwritten(self, messages: Messages, *, tools: Tools, variables: Variables) -> list[str]:
        """`tools`, `tool_calls`: which of them the template leaves out, so that the model would not see any of them."""
        calls = [
            {"content": "", **{k: v for k, v in each.items() if k != "tool_calls"}}
            for each in messages
        ]
        others: dict[str, tuple[Messages, Any]] = {"tools": (messages, None)} if tools else {}
        others |= (
            {"tool_calls": (calls, tools)}
            if any(each.get("tool_calls") for each in messages)
            else {}
        )
        unwritten = []
        for what, (bare, bare_tools) in others.items():
            text = self.render(messages, tools=tools, variables=variables)
            with contextlib.suppress(RowError):  # it refuses to render without them
                if self.render(bare, tools=bare_tools, variables=variables) == text:
                    unwritten.append(what)
        return unwritten

    def _whole(
        self, messages: Messages, tools: Tools, variables: Variables, text: str
    ) -> Whole:
        def after_mark(turns: Messages) -> str:
            shown = self.render(turns, tools=tools, variables=variables)
            marked = self._marks(turns, tools, variables, shown)
            return shown[marked[-1][1] :] if marked else ""

        return Whole(
            list(messages),
            text,
            partial(self.render, tools=tools, variables=variables),
            after_mark,
        )

    def completion(
        self,
        messages: Messages,
        num_prompt: int,
        *,
        tools: Tools = None,
        variables: Variables = None,
    ) -> Rendered:
        """A conversation's text, of which all is the assistant's that follows the first `num_prompt` messages.

        Raises:
            RowError: as `render`, or the prompt is rendered in another way when the completion follows.
        """
        text = self.render(messages, tools=tools, variables=variables)
        prompt = self.render(
            messages[:num_prompt], tools=tools, variables=variables, prompt=True
        )
        if not text.startswith(prompt):
            raise RowError(
                "the chat template renders the prompt differently when the completion follows",
                "a template that renders it the same way",
                train_on="assistant",
            )
        whole = self._whole(messages, tools, variables, text)
        return Rendered(text, (whole.closed(Turn(len(prompt), len(text), len(messages) - 1)),))

    def _marks(
        self, messages: Messages, tools: Tools, variables: Variables, text: str
    ) -> list[tuple[int, int]]:
        """The spans marked by the template, found by rendering it with a character in place of each mark."""
        shown = self._bordered.render(messages, tools=tools, variables=variables)
        pieces = _BORDER.split(shown)
        if (
            "".join(pieces) != text
            or len(pieces) % 2 == 0
            or "".join(_BORDER.findall(shown)) != _OPEN_CLOSE * (len(pieces) // 2)
        ):
            raise RowError(
                "what the template marks as generated cannot be located: the marks are inside text that it changes",
                "{% generation %} around text that is written unchanged",
            )
        places = [0, *accumulate(map(len, pieces))]
        return list(zip(places[1::2], places[2::2], strict=False))

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
    def _without_content(self) -> Mapping[str, Any]:
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
    def _bordered(self) -> ChatTemplate:
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


def _as_text(call: Any) -> Any:
    """A call whose arguments are the JSON of what they are."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _as_text(call["function"])}
    written = not isinstance(call.get("arguments", ""), str)
    return (
        {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
        if written
        else call
    )
