"""What a build adds to pyproject.toml: the project's address, and README.md as it is shown without its repository.

A page of a package index has no files beside it. Where CI says which repository it builds, relative links of README.md
lead there, and it is the project's address. Elsewhere they are plain text, and the picture is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"\[([^\[\]]+)\]\((?!https?:|#)([^)\s]+)\)"


def address(environ: Mapping[str, str]) -> str | None:
    """The repository that GitHub's or GitLab's CI builds, or None."""
    if {"GITHUB_SERVER_URL", "GITHUB_REPOSITORY"} <= environ.keys():
        return f"{environ['GITHUB_SERVER_URL']}/{environ['GITHUB_REPOSITORY']}"
    return environ.get("CI_PROJECT_URL")


def alone(readme: str, url: str | None) -> str:
    """README.md without anything that lies beside it."""
    if url is None:
        text = re.sub(rf"!{_RELATIVE}\n*", "", readme)
        return re.sub(_RELATIVE, r"\1", text)
    text = re.sub(rf"!{_RELATIVE}", rf"![\1]({url}/raw/HEAD/\2)", readme)
    return re.sub(rf"(?<!!){_RELATIVE}", rf"[\1]({url}/blob/HEAD/\2)", text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills the fields that pyproject.toml lists as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        url = address(os.environ)
        text = alone((Path(self.root) / "README.md").read_text(encoding="utf-8"), url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = (
            {} if url is None else {"Source": url, "Changelog": f"{url}/blob/HEAD/CHANGELOG.md"}
        )
