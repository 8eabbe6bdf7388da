"""What is wrong with a name that no model could be read from: a folder here, or an id on the Hub."""

from __future__ import annotations

import difflib
from pathlib import Path

from threefold.errors import ConfigError

_EXPECTED = "a folder with config.json and weights"


def refuse_wrong_path(name: str) -> None:
    """ConfigError if `name` is something here from which no model can be read, or a path at which nothing is."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _without_config(path)
    elif path.exists():
        fix = f"--model.name_or_path {path.parent}   (the folder of the file)"
        raise ConfigError(
            f"model.name_or_path = {name!r} is a file, not a folder",
            expected=_EXPECTED,
            fix=fix,
        )
    elif _is_path(name):
        raise ConfigError(
            f"model.name_or_path = {name!r}: no such folder",
            expected=_EXPECTED,
            fix=_nearest(path),
        )


def unreachable(name: str, error: Exception) -> ConfigError:
    """The error for a model that transformers or the Hub's client could not read."""
    expected, fix = _EXPECTED, "check the path"
    if not Path(name).is_dir():
        expected = "a local folder, or a Hub id that can be reached"
        fix = "check the name, your connection, and `hf auth login` for gated models"
        if (near := _near(Path(name))) is not None:
            fix = f"did you mean the folder {near}? Otherwise {fix}"
    what = f"model.name_or_path = {name!r} cannot be read: {str(error).strip().splitlines()[0]}"
    return ConfigError(what, expected=expected, fix=fix)


def _is_path(name: str) -> bool:
    """Whether a name can be a path only: an id on the Hub is NAME or OWNER/NAME."""
    return (
        name.startswith((".", "/", "~"))
        or name.endswith("/")
        or "\\" in name
        or name.count("/") > 1
    )


def _without_config(path: Path) -> ConfigError:
    what = f"model.name_or_path = {str(path)!r} has no config.json"
    fix = "check the path"
    inside = sorted(each.parent for each in path.glob("*/config.json"))
    if not any(path.iterdir()):
        what = f"model.name_or_path = {str(path)!r} is an empty folder"
    elif (path / "checkpoints").is_dir():
        what += ": it is the folder of a run"
        fix = f"threefold export {path} --to DIR   and --model.name_or_path DIR"
    elif inside:
        fix = "   or   ".join(f"--model.name_or_path {each}" for each in inside[:3])
    return ConfigError(what, expected=_EXPECTED, fix=fix)


def _nearest(path: Path) -> str:
    if str(path).startswith("~") and path.expanduser().is_dir():
        return f"--model.name_or_path {path.expanduser()}   (~ is the shell's, and was quoted)"
    near = _near(path)
    return f"did you mean {near}?" if near is not None else "check the path"


def _near(path: Path) -> Path | None:
    """The folder beside `path` with the most similar name."""
    if not path.parent.is_dir():
        return None
    names = [each.name for each in path.parent.iterdir() if each.is_dir()]
    found = difflib.get_close_matches(path.name, names, n=1)
    return path.with_name(found[0]) if found else None
