"""Rows with two answers to one prompt, chosen and rejected: each becomes a document, the prompt followed by the answer.

The prompt is the row's own. Without one it is the common beginning of both answers: whole messages, or a text up to
the last white space that both have. Answers that are whole conversations may repeat the prompt. The prompt must be
the same tokens in both documents, and at least one: only then does the loss of a pair compare its answers.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from threefold.data.chat.formats import (
    Columns,
    Example,
    RowError,
    example_of,
    in_common,
    values_of,
)
from threefold.data.chat.loss_mask import Encoder
from threefold.data.text.source import SIDES, Labelled, kind_of
from threefold.jsonl import Values

_ANSWER = "an answer after the prompt: a text, or a turn of the assistant"


def labelled_pair(row: Values, columns: Columns, encoder: Encoder) -> list[Labelled]:
    """The documents of a row: the prompt with the chosen answer, then the prompt with the rejected one.

    Raises:
        RowError: as `pair_of`; answers cannot be located; the documents are the same, or have two prompts.
    """
    pair = []
    for name, example in zip(SIDES, pair_of(row, columns), strict=True):
        with _named(name):
            pair.append(encoder.labelled(example))
    _refuse_unlike(*pair)
    return pair


def pair_of(row: Values, columns: Columns) -> list[Example]:
    """The row's prompt with the chosen answer, and with the rejected one.

    Raises:
        RowError: a column is missing or has another form, or an answer is empty.
    """
    values = values_of(row, columns)
    keys = {key: columns.fields[key] for key in ("role", "content") if key in columns.fields}
    read = Columns("prompt_completion", ("prompt", "completion"), keys)
    pair = []
    for name, (prompt, answer) in zip(SIDES, _with_prompts(values, keys), strict=True):
        with _named(name):
            if answer in ("", []):
                raise RowError("it is empty", _ANSWER)
            example = example_of({**values, "prompt": prompt, "completion": answer}, read)
            turns = example.messages[example.num_prompt :]
            if turns and turns[0]["role"] != "assistant":
                raise RowError(f"it begins with a turn of the {turns[0]['role']}", _ANSWER)
            if turns and not any(
                each.get("content") or each.get("tool_calls") for each in turns
            ):
                raise RowError("it is empty", _ANSWER)
            pair.append(example)
    return pair


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """An error of one side names the side; for a pair, changing data.train_on does not help."""
    try:
        yield
    except RowError as error:
        raise type(error)(f"{name!r}: {error.what}", error.expected) from None


def _with_prompts(values: Values, keys: Mapping[str, str]) -> Sequence[tuple[Any, Any]]:
    """(prompt, answer) of either side, as the row has them; RowError if they cannot be separated."""
    prompt, answers = values.get("prompt"), [values[name] for name in SIDES]
    for name, answer in zip(SIDES, answers, strict=True):
        if answer is None:
            raise RowError(f"{name!r} is missing or null", f"{name!r} in every row")
        if not isinstance(answer, str | list):
            raise RowError(f"{name!r} is {kind_of(answer)}", "a text, or a list of messages")
    if len({type(answer) for answer in answers}) > 1:
        raise RowError(
            " and ".join(
                f"{name!r} is {kind_of(answer)}"
                for name, answer in zip(SIDES, answers, strict=True)
            ),
            "two texts, or two lists of messages",
        )
    if isinstance(prompt, list):
        begun = [
            isinstance(answer, list) and answer[: len(prompt)] == prompt for answer in answers
        ]
        return [
            (prompt, answer[len(prompt) :] if is_whole else answer)
            for answer, is_whole in zip(answers, begun, strict=True)
        ]
    if prompt is None or all(_asks(answer, prompt, keys) for answer in answers):
        return _apart(*answers)
    return [(prompt, answer) for answer in answers]


def _asks(answer: Any, prompt: Any, keys: Mapping[str, str]) -> bool:
    """Whether an answer is a whole conversation whose first question is the text `prompt`."""
    if not isinstance(answer, list) or not all(
        isinstance(message, Mapping) for message in answer
    ):
        return False
    for message in answer:
        role = message.get(keys.get("role", "role"), message.get("from"))
        if role != "system":
            question = message.get(keys.get("content", "content"), message.get("value"))
            return role in ("user", "human") and bool(question == prompt)
    return False


def _apart(chosen: Any, rejected: Any) -> list[tuple[Any, Any]]:
    """Two answers without a prompt as what both begin with and what follows, which is never nothing."""
    length = in_common(chosen, rejected)
    if isinstance(chosen, str):
        common = chosen[:length]
        # No token should cross the border, and most tokenizers begin tokens with a space.
        length = len(
            common.rstrip() if common[-1:].isspace() else "".join(common.rsplit(None, 1)[:-1])
        )
    else:
        length = min(length, len(chosen) - 1, len(rejected) - 1)
        if length < 1:
            raise RowError(
                "there is no prompt, and 'chosen' and 'rejected' have no opening turn in common",
                "a prompt, or two conversations that begin with the same turns",
            )
    return [(answer[:length], answer[length:]) for answer in (chosen, rejected)]


def _refuse_unlike(chosen: Labelled, rejected: Labelled) -> None:
    """Refuses two documents that are the same, or that do not have one prompt."""
    if np.array_equal(chosen.ids, rejected.ids):
        raise RowError(
            "'chosen' and 'rejected' are the same, token for token", "two answers that differ"
        )
    begins = [int(np.argmax(each.loss_mask)) for each in (chosen, rejected)]
    if begins[0] != begins[1] or not np.array_equal(
        chosen.ids[: begins[0]], rejected.ids[: begins[1]]
    ):
        shared = min(*begins, in_common(chosen.ids.tolist(), rejected.ids.tolist()))
        raise RowError(
            f"the prompt has different tokens before the two answers: {begins[0]} before 'chosen', {begins[1]} before "
            f"'rejected', diverging after {shared}",
            "a prompt that ends where a token ends, such as one without white space at its end",
        )
    if not begins[0]:
        raise RowError(
            "nothing comes before the answers, so that their first token could not be trained on",
            "a prompt, or answers with a common beginning   (or a token before each text: --data.bos true)",
        )
