"""Run first by every interpreter of a watched command: waits for `import torch`, and attaches the recorder there.

The folder of this file is put in front of PYTHONPATH by `threefold referee` and holds nothing else, so that it hides no
module of the user's. A `sitecustomize` that the user has runs as it would without the referee. No import but of the
standard library; without THREEFOLD_REFEREE in the environment nothing is attached.
"""

import importlib.abc
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
_RECORD, _ALONE = "THREEFOLD_REFEREE", "THREEFOLD_REFEREE_ALONE"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `action` with a module as soon as it is imported."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action
        self._looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # Asking for the spec comes back here, which leaves it to the finders behind.
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_attach(module: ModuleType) -> None:
            execute(module)
            try:
                self._action(module)
            except Exception:
                print(
                    "threefold referee: not attached; the program continues without it",
                    file=sys.stderr,
                )
                traceback.print_exc()

        spec.loader.exec_module = execute_and_attach  # type: ignore[method-assign]
        return spec


def _run(spec: Any) -> None:
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _part(part: str) -> Any:
    # By its place: the watched interpreter may be one in which threefold is not installed.
    name, folder = "_threefold_referee", _HERE.parent / "rank"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        _run(spec)
    return importlib.import_module(f"{name}.{part}")


def _take_model(torch: ModuleType) -> None:
    # If the program's Python has no threefold, this one's comes after all of its own modules.
    sys.path.append(str(_HERE.parents[2]))
    importlib.import_module("threefold.referee.judge.alone").take_model(
        Path(os.environ[_ALONE])
    )


def _run_the_users() -> None:
    """Runs the `sitecustomize` that this one hides, if there is one; its errors are its own."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None:
        _run(spec)


# Imported as a module of the package, by a test say, it does nothing.
if __name__ == "sitecustomize":
    if os.environ.get(_ALONE):
        sys.meta_path.insert(0, _AfterImport("torch", _take_model))
    elif os.environ.get(_RECORD):
        sys.meta_path[:0] = [
            _AfterImport("torch", lambda torch: _part("recorder").attach(os.environ)),
            _AfterImport(
                "torch.distributed.fsdp", lambda fsdp: _part("recorder").watch_sharding(fsdp)
            ),
        ]
    _run_the_users()
