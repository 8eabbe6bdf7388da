"""Pieces of HTML whose texts are always escaped: text from files can only ever be shown.

`Html` is text that is markup already. Everything else that goes into a piece is escaped, and characters that steer a
terminal or the direction of text are shown by their codes.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from threefold.errors import visible

_MOST = 4000


class Html(str):
    """Markup, made here."""


def shown(value: Any, *, most: int = _MOST) -> Html:
    """A value as text of a page; at most `most` characters of it."""
    if isinstance(value, Html):
        return value
    whole = str(value)
    cut = whole if len(whole) <= most else f"{whole[:most]}... ({len(whole):,} characters)"
    return Html(escape(visible(cut), quote=True))


def tag(name: str, /, *inside: Any, **attributes: Any) -> Html:
    """An element; `class_` and `for_` are attributes whose names Python reserves, `aria_label` is `aria-label`."""
    attrs = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{shown(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(
        f"<{name}{attrs}>" if name == "input" else f"<{name}{attrs}>{join(inside)}</{name}>"
    )


def join(pieces: Iterable[Any]) -> Html:
    return Html("".join(map(shown, pieces)))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """A table whose first column names its rows, in a box that scrolls sideways on a narrow screen."""
    columns = join(tag("th", name, scope="col") for name in head)
    body = join(
        tag("tr", tag("th", first, scope="row"), join(tag("td", cell) for cell in rest))
        for first, *rest in rows
    )
    inside = tag("caption", caption), tag("thead", tag("tr", columns)), tag("tbody", body)
    return tag(
        "div",
        tag("table", *inside),
        class_="wide",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def details(summary: str, *inside: Any, name: str) -> Html:
    """A collapsible part; when the page is redrawn it stays open, by its name."""
    return tag("details", tag("summary", summary), *inside, data_keep=name)


def pasted(command: str) -> Html:
    """A command with a button that copies it."""
    return Html(
        tag("code", command)
        + tag("button", "copy", type_="button", class_="copy", aria_label=f"copy: {command}")
    )


def data(identity: str, values: Any) -> Html:
    """Values as a block of JSON that no text in them can end."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" id="{escape(identity)}">{text}</script>')
