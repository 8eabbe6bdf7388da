"""The hook of mkdocs.yml: pages of the site that lie outside of docs/, and links to them.

README.md is the front page, CHANGELOG.md and each known error are pages, and links to them work on the site as they do
in a checkout. Other files of the repository are not on the site: a link to one is shown as its text. What leads nowhere
is left, and mkdocs refuses it.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ERRORS = "src/threefold/explain/pages/"
NAMED = {"README.md": "index.md", "CHANGELOG.md": "changes.md"}
NOT_SHOWN = "docs/design/"
MERMAID = ROOT / ".venv-docs" / "mermaid.min.js"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//"
)
log = logging.getLogger("mkdocs.hooks.site_pages")


def place(path: str) -> str | None:
    """Where the site has a file of the repository, as mkdocs names sources: docs/data.md is data.md; None: nowhere."""
    if (
        path.startswith("docs/")
        and path.endswith((".md", ".png", ".webp"))
        and not path.startswith(NOT_SHOWN)
    ):
        return path.removeprefix("docs/")
    if path.startswith(ERRORS) and path.endswith(".md"):
        return f"errors/{path.removeprefix(ERRORS)}"
    return NAMED.get(path)


def linked(path: str, text: str) -> str:
    """The text of a file with its links as the site has them."""

    def moved(match: re.Match[str]) -> str:
        mark, words, link, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if target.startswith("..") or not (ROOT / target).exists():
            return match[0]
        if (there := place(target)) is None:
            return words
        here = posixpath.dirname(place(path) or "")
        return f"{mark}[{words}]({posixpath.relpath(there, here or '.')}{anchor or ''})"

    parts = [(part.start(), part.end()) for part in _CODE.finditer(text)]
    pieces, end = [], 0
    for start, stop in parts:
        pieces += [_LINK.sub(moved, text[end:start]), text[start:stop]]
        end = stop
    return "".join([*pieces, _LINK.sub(moved, text[end:])])


def on_config(config: Any) -> None:
    """Has diagrams drawn by the library that make docs has fetched; without it they stay text."""
    if MERMAID.exists():
        config["extra_javascript"].append(MERMAID.name)
    else:
        # The theme would load it from another host.
        config["mdx_configs"]["pymdownx.superfences"]["custom_fences"] = []


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md, CHANGELOG.md and the errors."""
    for path in (
        *NAMED,
        *(file.relative_to(ROOT).as_posix() for file in sorted((ROOT / ERRORS).glob("*.md"))),
    ):
        files.append(
            File.generated(
                config, str(place(path)), content=linked(path, (ROOT / path).read_text("utf-8"))
            )
        )
    if MERMAID.exists():
        files.append(File.generated(config, MERMAID.name, abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Moves the links of a page of docs/; those of other pages are moved already."""
    return markdown if page.file.generated_by else linked(f"docs/{page.file.src_uri}", markdown)


def on_post_build(config: Any) -> None:
    """Warns of a page that would load anything from another host."""
    for page in Path(config["site_dir"]).rglob("*.html"):
        if found := _LOADED.search(page.read_text(encoding="utf-8")):
            log.warning("%s loads from another host: %s", page, found[0])
