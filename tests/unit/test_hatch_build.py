"""hatch_build.py: README.md as a package index shows it, and the project's address where CI knows it."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import hatch_build

ROOT = Path(__file__).parents[2]
RELATIVE = re.compile(r"\]\((?!https?:)[^)]*\)")
README = (ROOT / "README.md").read_text()
TEXT = (
    "![a picture of\ntwo lines](docs/a.png)\n\nSee [the "
    "page](docs/page.md#part), [there](https://a.test/b) and [Y](Z)."
)


def test_without_an_address_links_are_text_and_the_picture_is_left_out() -> None:
    assert hatch_build.alone(TEXT, None) == "See the page, [there](https://a.test/b) and Y."


def test_with_an_address_links_and_picture_lead_to_the_repository() -> None:
    assert hatch_build.alone(TEXT, "https://host.test/us/ours") == (
        "![a picture of\ntwo lines](https://host.test/us/ours/raw/HEAD/docs/a.png)\n\n"
        "See [the page](https://host.test/us/ours/blob/HEAD/docs/page.md#part), [there](https://a.test/b) "
        "and [Y](https://host.test/us/ours/blob/HEAD/Z)."
    )


@pytest.mark.parametrize("url", [None, "https://host.test/us/ours"])
def test_readme_leads_to_no_file_beside_it(url: str | None) -> None:
    assert RELATIVE.search(README)
    shown = hatch_build.alone(README, url)
    assert RELATIVE.findall(shown) == [] and shown.startswith("# Threefold\n")
    # All but links is there: the blocks of code, word for word.
    assert re.findall(r"^    .+$", shown, re.M) == re.findall(r"^    .+$", README, re.M)


def test_address_is_what_ci_builds() -> None:
    github = {"GITHUB_SERVER_URL": "https://host.test", "GITHUB_REPOSITORY": "us/ours"}
    assert hatch_build.address(github) == "https://host.test/us/ours"
    assert (
        hatch_build.address({"CI_PROJECT_URL": "https://lab.test/us/ours"})
        == "https://lab.test/us/ours"
    )
    assert hatch_build.address({"GITHUB_REPOSITORY": "us/ours"}) is None


def test_metadata_has_no_made_up_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "CI_PROJECT_URL"):
        monkeypatch.delenv(name, raising=False)
    metadata: dict[str, object] = {}
    hatch_build.CustomMetadataHook(str(ROOT), {}).update(metadata)
    assert metadata["urls"] == {}
    assert metadata["readme"] == {
        "content-type": "text/markdown",
        "text": hatch_build.alone(README, None),
    }
    assert {"readme", "urls"} <= {
        *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
    }
