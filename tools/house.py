"""How large the house is, against the bounds in tools/house.toml. Exits with 1 if one is exceeded.

    python tools/house.py             everything, and a run whose first step is traced (a quarter of a minute)
    python tools/house.py --static    what needs no run
    python tools/house.py --rooms     code tokens of every room

A code token is a name, an operator, a number or a string: what a reader must take in, however it is laid out in lines.
So the comma before a closing bracket, which the formatter writes where it breaks a line, is none.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "threefold"
MODULES = sorted(SOURCE.rglob("*.py"))
# Rooms that a run on local disks does not load, with bounds of their own.
REFEREE, PLACES = SOURCE / "referee", SOURCE / "places"
EXPLAIN = SOURCE / "explain"
_CLOSING = (")", "]", "}")
_COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def code_tokens(path: Path) -> int:
    """The code tokens of a module."""
    return len(_token_lines(path))


def _token_lines(path: Path) -> list[int]:
    """The line of every code token."""
    with path.open(encoding="utf-8") as file:
        tokens = [
            each for each in tokenize.generate_tokens(file.readline) if each.type in _COUNTED
        ]
    return [
        token.start[0]
        for token, after in zip_longest(tokens, tokens[1:])
        if token.string != "," or after is None or after.string not in _CLOSING
    ]


def class_names() -> Counter[str]:
    """How many classes of the source have each name."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in MODULES)
    return Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )


def options() -> list[str]:
    """The options of all commands, as `command --option`; keys of the config are none."""
    import typer

    from threefold.commands import main

    def visit(command: object, path: str) -> Iterator[str]:
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            yield from visit(inner, f"{path} {name}".strip())
        for parameter in getattr(command, "params", []):
            if parameter.param_type_name == "option" and parameter.name != "help":
                yield f"{path} {max(parameter.opts, key=len)}".strip()

    main._load(main._COMMANDS)
    return list(visit(typer.main.get_command(main.app), ""))


def _of_explain() -> int:
    """Its code, and the words and marks of its pages, which hold the expressions."""
    pages = [path.read_text(encoding="utf-8") for path in EXPLAIN.glob("pages/*.md")]
    words = sum(len(re.findall(r"\w+|[^\w\s]", page)) for page in pages)
    return words + sum(map(code_tokens, EXPLAIN.rglob("*.py")))


def measure(*, static: bool) -> dict[str, float]:
    """Each bound's name, and what it is now."""
    from threefold.config.schema import every_key

    apart = {
        room: [path for path in MODULES if path.is_relative_to(room)]
        for room in (REFEREE, PLACES)
    }
    rooms = [path for path in MODULES if not any(path in paths for paths in apart.values())]
    lines = [_token_lines(path) for path in rooms]
    tokens = sum(map(len, lines))
    measured: dict[str, float] = {
        "code tokens": tokens,
        "lines": sum(path.read_text(encoding="utf-8").count("\n") for path in rooms),
        "code tokens a line": round(tokens / sum(len(set(each)) for each in lines), 2),
        "code tokens of the referee": sum(map(code_tokens, apart[REFEREE])),
        "code tokens of the places": sum(map(code_tokens, apart[PLACES])),
        "code tokens and words of explain": _of_explain(),
        "config keys": len(every_key()),
        "options of the commands": len(options()),
        "class names with two meanings": sum(count > 1 for count in class_names().values()),
    }
    if not static:
        import step_path

        entered, _ = step_path.traced(["--mesh.dp", "1"])
        measured["modules of a run's first step"] = len(entered)
        measured["code tokens of a run's first step"] = sum(
            code_tokens(SOURCE / module) for module in entered
        )
    return measured


def main(arguments: list[str]) -> int:
    if "--rooms" in arguments:
        rooms: Counter[str] = Counter()
        for path in MODULES:
            rooms[path.relative_to(SOURCE).parts[0]] += code_tokens(path)
        for room, tokens in rooms.most_common():
            print(f"{tokens:9,}  {room}")
        return 0
    bounds = tomllib.loads((ROOT / "tools" / "house.toml").read_text(encoding="utf-8"))[
        "bounds"
    ]
    exceeded = False
    for name, value in measure(static="--static" in arguments).items():
        over = value > bounds[name]
        exceeded |= over
        print(
            f"{name:34} {value:9,}  of at most {bounds[name]:9,}{'  EXCEEDED' if over else ''}"
        )
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
