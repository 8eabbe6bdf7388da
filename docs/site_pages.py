"""The hook of mkdocs.yml: pages of the site that lie outside of docs/, and links to them.

README.md is the front page; each known error is a page; a file or folder of the repository that a page links to is a
page that shows it. So a link works on the site as it does in a checkout. What leads nowhere is left; mkdocs refuses it.
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
NAMED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//"
)
log = logging.getLogger("mkdocs.hooks.site_pages")


def place(path: str) -> str:
    """Where the site has a file of the repository, as mkdocs names sources: docs/data.md is data.md."""
    if path.startswith("docs/") and path.endswith((".md", ".png", ".webp")):
        return path.removeprefix("docs/")
    if path.startswith(ERRORS) and path.endswith(".md"):
        return f"errors/{path.removeprefix(ERRORS)}"
    return NAMED.get(path) or (f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md")


def linked(path: str, text: str) -> tuple[str, set[str]]:
    """The text of a file with its links as the site has them, and the files of the repository that they lead to."""
    found = set()

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if target.startswith("..") or not (ROOT / target).exists():
            return match[1]
        found.add(target)
        return posixpath.relpath(place(target), posixpath.dirname(place(path)) or ".")

    return _LINK.sub(moved, text), found


def shown(path: str) -> str:
    """A file of the repository as a page: Markdown as it is, anything else as code, a folder as a list of its files."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.is_file() and not each.name.startswith("."))
        return f"# {path}\n\n" + "".join(f"- [{name}]({posixpath.basename(path)}/{name})\n" for name in names)
    text = file.read_text(encoding="utf-8")
    if path.startswith(ERRORS):
        head, _, body = text.removeprefix("---\n").partition("\n---\n")
        check = re.search(r"^check: (.+)$", head, re.MULTILINE)
        return f"{body.strip()}\n\n" + (f"What would settle it:\n\n    {check[1]}\n" if check else "")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n``````{file.suffix.lstrip('.') or 'text'}\n{text.rstrip()}\n``````\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md, the errors, and everything in the repository that a page, or one of these, links to."""
    waiting = {*NAMED, *(file.relative_to(ROOT).as_posix() for file in (ROOT / ERRORS).glob("*.md"))}
    for file in files.documentation_pages():
        waiting |= linked(f"docs/{file.src_uri}", file.content_string)[1]
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        done.add(path)
        if files.get_file_from_path(place(path)) is None:
            text, more = linked(path, shown(path))
            files.append(File.generated(config, place(path), content=text))
            waiting |= more - done
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Moves the links of a page of docs/; those of other pages are moved already."""
    return markdown if page.file.generated_by else linked(f"docs/{page.file.src_uri}", markdown)[0]


def on_post_build(config: Any) -> None:
    """Warns of a page that would load anything from another host."""
    for page in Path(config["site_dir"]).rglob("*.html"):
        if found := _LOADED.search(page.read_text(encoding="utf-8")):
            log.warning("%s loads from another host: %s", page, found[0])
