"""What the house promises of its rooms; tools/house.py measures its size."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "threefold"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")

MOST_PARAMETERS = 8

# Signatures that users write, where each parameter is a setting of theirs.
PUBLIC_SIGNATURES = {
    "data/sampling/sampler.py:DistributedSampler.__init__",
    "data/sampling/streaming.py:StreamingLoader.__init__",
    "mesh/mesh.py:init_mesh",
    "run/start.py:train",
    "run/load_model.py:load_model",
    "optim/muon.py:Muon.__init__",
    "optim/fused_kernel.py:_update",  # a kernel's, whose arguments are pointers and numbers
    "training/loss_kernel.py:_gradients",
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


@functools.cache
def all_functions() -> list[tuple[str, ast.FunctionDef]]:
    return [pair for path in MODULES for pair in functions(path)]


def test_no_function_takes_many_parameters() -> None:
    counts = {
        name: len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        for name, node in all_functions()
        if not name.startswith("commands/") and name not in PUBLIC_SIGNATURES
    }
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_public_signatures_are_there() -> None:
    assert {name for name, _ in all_functions()} >= PUBLIC_SIGNATURES


def test_packages_hold_nothing_themselves() -> None:
    speaking = {SOURCE / "__init__.py", SOURCE / "integrations" / "huggingface" / "__init__.py"}
    assert [
        name_of(path)
        for path in SOURCE.rglob("__init__.py")
        if path.read_text() and path not in speaking
    ] == []


def test_every_module_has_a_row_in_the_house() -> None:
    """A row names a room and its modules, or a folder of it as `folder/`; nothing in it is gone."""
    rooms: dict[str, set[str]] = {}
    room = ""
    for line in (SOURCE.parents[1] / "docs" / "design" / "house.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 3 or cells[0] in ("floor", "---"):
            continue
        room = cells[0].strip("`") or room
        rooms.setdefault(room.partition("/")[0], set()).update(
            re.findall(r"`([^`]+)`", cells[1])
        )
    named = {name.strip("/") for names in rooms.values() for name in names}
    lacking = []
    for path in MODULES:
        room, *folders = path.relative_to(SOURCE).with_suffix("").parts
        known = rooms.get(room, set())
        if (
            folders
            and room != "commands"
            and not known & {"/".join(folders), folders[-1], f"{folders[0]}/"}
        ):
            lacking.append(name_of(path))
    assert lacking == []
    stems = {
        part
        for path in SOURCE.rglob("*")
        for part in (path.stem, path.relative_to(SOURCE).with_suffix("").as_posix())
    }
    inside = {
        path.relative_to(SOURCE).with_suffix("").as_posix().partition("/")[2]
        for path in SOURCE.rglob("*")
    }
    assert {name for name in named if name not in stems | inside} == set()
