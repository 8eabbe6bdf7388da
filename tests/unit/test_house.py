"""What the house promises of its rooms: a name for each, no long functions, no long parameter lists, a size."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "threefold"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")

# Named after the room that they serve: `commands/verify.py` is the command of `verify/`.
NAMED_AFTER_OTHERS = ("commands", "integrations/huggingface")
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 8
MOST_LINES_OF_A_FILE = 330
MOST_LINES = 51_950

# Signatures that users write: each parameter is a setting of theirs.
PUBLIC_SIGNATURES = {
    "data/sampler.py:DistributedSampler.__init__",
    "data/streaming.py:StreamingLoader.__init__",
    "mesh/mesh.py:init_mesh",
    "run/start.py:train",
    "run/make_step.py:load_model",
    "run/make_step.py:make_step",
    "training/muon.py:Muon.__init__",
    "training/saving.py:save",
    "training/step.py:TrainStep.__init__",
}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def functions(path: Path) -> list[tuple[str, ast.FunctionDef]]:
    """(qualified name, node) of every function of a module."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if not isinstance(child, ast.ClassDef):
                    found.append((f"{name_of(path)}:{prefix}{child.name}", child))
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(path.read_text()), "")
    return found


FUNCTIONS = [pair for path in MODULES for pair in functions(path)]


def test_no_base_name_stands_twice() -> None:
    names = Counter(path.stem for path in MODULES if not name_of(path).startswith(NAMED_AFTER_OTHERS))
    assert [name for name, count in names.items() if count > 1] == []


def test_three_files_with_one_prefix_are_a_folder() -> None:
    files = defaultdict(set)
    for path in MODULES:
        files[path.parent, path.stem.split("_")[0]].add(path.stem)
    assert [sorted(names) for names in files.values() if len(names) > 2] == []


def test_functions_fit_a_screen() -> None:
    long = {name: node.end_lineno - node.lineno + 1 for name, node in FUNCTIONS if node.end_lineno is not None}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


def test_no_function_takes_many_parameters() -> None:
    counts = {
        name: len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        for name, node in FUNCTIONS
        if not name.startswith("commands/") and name not in PUBLIC_SIGNATURES
    }
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_public_signatures_are_there() -> None:
    assert {name for name, _ in FUNCTIONS} >= PUBLIC_SIGNATURES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_file_is_one_room(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_A_FILE


def test_packages_hold_nothing_themselves() -> None:
    speaking = {SOURCE / "__init__.py", SOURCE / "integrations" / "huggingface" / "__init__.py"}
    assert [name_of(path) for path in SOURCE.rglob("__init__.py") if path.read_text() and path not in speaking] == []


def test_size_of_the_house() -> None:
    assert sum(len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")) <= MOST_LINES
