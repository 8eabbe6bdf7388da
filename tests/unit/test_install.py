"""tools/install.py gives uv what pip is told, or leaves the installation to pip."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import install


def test_pips_settings_have_their_counterparts() -> None:
    settings = {
        "index-url": "https://one.test/simple",
        "extra-index-url": "https://two.test/simple\nhttps://three.test/simple",
        "find-links": "/one /two",
        "timeout": "60",
    }
    assert install.for_uv(settings) == {
        "UV_DEFAULT_INDEX": "https://one.test/simple",
        "UV_INDEX": "https://two.test/simple https://three.test/simple",
        "UV_FIND_LINKS": "/one,/two",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_setting_without_a_counterpart_leaves_it_to_pip() -> None:
    assert install.for_uv({"only-binary": ":all:"}) is None


def test_environment_counts_before_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nfind-links = /of-the-file\n[install]\nproxy = http://proxy.test\n[list]\nformat = json\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_FIND_LINKS", "/of-the-environment")
    settings = install.settings(Path(sys.executable))
    assert (
        settings["find-links"] == "/of-the-environment"
        and settings["proxy"] == "http://proxy.test"
    )
    assert "format" not in settings
