"""The documentation is what the code says: generated pages are current, links and tests exist, commands parse."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

import threefold
from threefold.commands import main
from threefold.commands.arguments import split
from threefold.config.described import keys_about
from threefold.config.schema import Config, every_key
from threefold.jobs.clusters import CLUSTERS, kind_of
from threefold.jobs.settings import read

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_config_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate_config.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr


def test_table_of_errors_is_current() -> None:
    code = "import generate_errors as page; assert page.page() == page.README.read_text(), 'docs/generate_errors.py'"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


def test_every_page_is_reached_from_the_front_page() -> None:
    reached, waiting = set[Path](), {ROOT / "README.md"}
    while waiting:
        reached.add(page := waiting.pop())
        targets = (
            page.parent / each
            for each in re.findall(r"\]\((?!https?:)([^)#]+\.md)", page.read_text())
        )
        waiting |= {target.resolve() for target in targets} - reached
    assert {*PAGES} - reached == set()


def test_page_of_the_python_interface_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    written = set(re.findall(r"^::: (threefold[\w.]+)$", page, re.MULTILINE))
    public = {
        f"{home}.{name}"
        for name, home in threefold._HOME_OF_NAME.items()
        if name in threefold.__all__
    }
    errors = {name for name in written if name.startswith("threefold.errors.")}
    assert public - {"threefold.errors"} == written - errors and len(errors) == 5
    for name in written:
        module, _, last = name.rpartition(".")
        assert getattr(importlib.import_module(module), last).__doc__, name


def test_keys_that_replace_those_of_other_programs_exist() -> None:
    page = (ROOT / "docs" / "other-libraries.md").read_text()
    sections = "|".join(Config.model_fields)
    rows = [
        line.split(" | ")
        for line in page[page.index("## Names for threefold train") :].splitlines()
    ]
    named = {
        key
        for row in rows
        for cell in row[1:]
        for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)", cell)
    }
    assert len(named) >= 30 and named <= set(every_key())


def test_picture_is_small() -> None:
    picture = (ROOT / "docs" / "images" / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 200_000


def test_tests_that_pages_name_are_there() -> None:
    named = {
        match
        for page in PAGES
        for match in re.findall(r"\b([\w/]+\.py)::(test_\w+)", page.read_text())
    }
    assert len(named) >= 20
    for file, test in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        assert test in {
            node.name for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")
        }, file


def test_what_others_report_names_threads_and_tests() -> None:
    page = (ROOT / "docs" / "design" / "others.md").read_text()
    rows = [
        line
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| others report")
    ]
    assert 20 <= len(rows) <= 40
    for row in rows:
        threads = re.findall(
            r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github.com/([\w./-]+)\)", row
        )
        assert threads, row
        for repository, number, address in threads:
            assert address in (f"{repository}/issues/{number}", f"{repository}/pull/{number}")
        links = re.findall(r"\[`([^`]+)::test_\w+`\]\(\.\./\.\./tests/([^)]+)\)", row)
        assert links and all(shown == target for shown, target in links), row


def commands(text: str) -> Iterator[str]:
    """The commands in the blocks of code of a page, a line each, without what a terminal shows beside them."""
    blocks = re.findall(
        r"^```(?:bash|sh|console|text)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    blocks += re.findall(
        r"(?:^    .*\n|^\n)+",
        re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    for block in blocks:
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            line = re.split(r"\s+#\s|\s{2,}\(| 2>&1| \|\s", line.strip().removeprefix("$ "))[
                0
            ].strip()
            if not re.search(r"\[-|\.\.\.|^threefold \d", line):
                yield line


COMMANDS = sorted(
    {
        (str(page.relative_to(ROOT)), line)
        for page in PAGES
        for line in commands(page.read_text())
    }
)
OURS = [
    (page, line)
    for page, line in COMMANDS
    if re.match(r"(threefold|torchrun .* -m threefold) [a-z]", line)
]
SCRIPTS = [
    (page, line) for page, line in COMMANDS if re.match(r"(python|torchrun) .*\.py\b", line)
]
MADE = [(page, line) for page, line in COMMANDS if re.match(r"make [a-z]", line)]


@pytest.fixture(scope="module")
def root() -> Any:
    app = typer.Typer(callback=lambda: None)
    kept, main.app = main.app, app
    main._load(main._COMMANDS)
    main.app = kept
    return typer.main.get_command(app)


def parsed(command: Any, name: str, words: list[str]) -> tuple[str, list[str]]:
    """(name of the command, words that it leaves to the config); an error if it would refuse its words."""
    context = command.make_context(name, list(words))
    if not hasattr(command, "commands"):
        return name, context.args
    name, inner, rest = command.resolve_command(
        context, [*context._protected_args, *context.args]
    )
    return parsed(inner, name, rest)


@pytest.mark.parametrize(("page", "line"), OURS)
def test_command_of_a_page_parses(root: Any, page: str, line: str) -> None:
    words = shlex.split(line.partition("threefold ")[2])
    if "--help" in words:
        assert keys_about(" ".join(words[words.index("--help") + 1 :]))
        return
    name, rest = parsed(root, "threefold", words)
    if name in CLUSTERS or "slurm" in words:  # of a preparation, too
        _, rest = read(kind_of(name if name in CLUSTERS else "slurm").Settings, rest, {})
    elif main._COMMANDS.get(name) is None and name not in ("prepare", "show", "overlap"):
        assert rest == []
    values: dict[str, Any] = {}
    for key, text in split(rest)[1]:
        *sections, last = key.split(".")
        inside = values
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = YAML(typ="safe", pure=True).load(text)
    Config.model_validate(values)


def test_pages_show_many_commands() -> None:
    assert len(OURS) >= 80 and len(SCRIPTS) >= 15 and len(MADE) >= 8


@pytest.mark.parametrize(("page", "line"), SCRIPTS)
def test_script_of_a_page_is_there(page: str, line: str) -> None:
    script = next(word for word in shlex.split(line) if word.endswith(".py"))
    text = (ROOT / page).read_text()
    assert (ROOT / script).exists() or text.count(script) > 1, script


@pytest.mark.parametrize(("page", "line"), MADE)
def test_target_of_a_page_is_there(page: str, line: str) -> None:
    assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
