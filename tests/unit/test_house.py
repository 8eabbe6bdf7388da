"""What the house promises of its rooms: no long parameter lists, and a size."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "threefold"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")

MOST_PARAMETERS = 8
# It only goes down: what enters says what leaves for it.
MOST_TOKENS = 371_300

# Signatures that users write: each parameter is a setting of theirs.
PUBLIC_SIGNATURES = {
    "data/sampler.py:DistributedSampler.__init__",
    "data/streaming.py:StreamingLoader.__init__",
    "mesh/mesh.py:init_mesh",
    "run/start.py:train",
    "run/load_model.py:load_model",
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


def test_no_function_takes_many_parameters() -> None:
    counts = {
        name: len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        for name, node in FUNCTIONS
        if not name.startswith("commands/") and name not in PUBLIC_SIGNATURES
    }
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_public_signatures_are_there() -> None:
    assert {name for name, _ in FUNCTIONS} >= PUBLIC_SIGNATURES


def test_packages_hold_nothing_themselves() -> None:
    speaking = {SOURCE / "__init__.py", SOURCE / "integrations" / "huggingface" / "__init__.py"}
    assert [name_of(path) for path in SOURCE.rglob("__init__.py") if path.read_text() and path not in speaking] == []


def test_size_of_the_house() -> None:
    """Names, operators, numbers and strings: what a reader must take in, however it is laid out in lines."""
    counted = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = 0
    for path in SOURCE.rglob("*.py"):
        with path.open() as file:
            tokens += sum(token.type in counted for token in tokenize.generate_tokens(file.readline))
    assert tokens <= MOST_TOKENS
