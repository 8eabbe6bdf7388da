"""Which modules one reads to follow a run from its YAML to the end of its first step: traced, not guessed.

    python tools/step_path.py [CONFIG.yaml] [--section.key value ...]

Runs `threefold train` on a small model with a data x context x tensor mesh of local ranks, and notes in the launching
process and on every rank in which modules of threefold a function ran until the first optimizer step was done. Prints
those modules in the order in which they were entered, with their lines, and the totals in lines and code tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from house import code_tokens

import threefold
from threefold.mesh import local_ranks

SOURCE = Path(threefold.__file__).parent
_PREFIX = f"{SOURCE}{os.sep}"
# The end of the first step: admission's probes run a step too, but not from the loop.
_LAST, _CALLER = ("training/step.py", "run"), "training/loop.py"
_FOLDER = "STEP_PATH_FOLDER"

CONFIG = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2}
data: {source: corpus.txt, seq_len: 32}
mesh: {dp: 2, cp: 2, tp: 2}
train: {steps: 1, global_batch: 8}
log: {sample_tokens: 0}
"""


class Tracer:
    """Notes the modules of threefold whose functions run, in order, until the first step has returned."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self._over = False
        self._known: set[CodeType] = set()  # nothing more is to be noted of their calls

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._over:
            sys.setprofile(None)  # in this thread
            return
        code = frame.f_code
        if code in self._known or event not in ("call", "return"):
            return
        if not code.co_filename.startswith(_PREFIX):
            self._known.add(code)
            return
        module, function = os.path.relpath(code.co_filename, SOURCE), code.co_name
        # A named function: no module, no class body, no comprehension that a module runs when it is imported.
        if (
            event == "call"
            and code.co_flags & inspect.CO_OPTIMIZED
            and not function.startswith("<")
        ):
            self.modules.setdefault(module)
        if (module, function) != _LAST:
            self._known.add(code)
        elif event == "return" and frame.f_back is not None:
            self._over = os.path.relpath(frame.f_back.f_code.co_filename, SOURCE) == _CALLER

    def trace(self, function: Callable[[], Any], name: str) -> Any:
        """Calls `function`, and leaves what it entered in the shared folder under `name`."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            return function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            loaded = [
                module.__file__
                for name, module in sys.modules.items()
                if name.startswith("threefold.")
            ]
            found = {
                "entered": list(self.modules),
                "loaded": [os.path.relpath(str(file), SOURCE) for file in loaded],
            }
            (Path(os.environ[_FOLDER]) / f"{name}.json").write_text(json.dumps(found))


def traced_entry(entry: Callable[..., None], folder: str, *args: Any) -> None:
    """A rank's entry, traced."""
    os.environ[_FOLDER] = folder
    Tracer().trace(lambda: entry(*args), f"rank-{os.environ['RANK']}")


def traced(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(modules of which a function ran, modules that were loaded besides) until the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_FOLDER] = folder
        os.environ.setdefault("XDG_CACHE_HOME", folder)
        (Path(folder) / "corpus.txt").write_text(
            " ".join(f"word{n * n % 97}" for n in range(4000))
        )
        if not arguments or arguments[0].startswith("--"):
            (Path(folder) / "config.yaml").write_text(CONFIG)
            arguments = [
                f"{folder}/config.yaml",
                "--data.source",
                f"{folder}/corpus.txt",
                *arguments,
            ]
        start_ranks, before = local_ranks.start_ranks, sys.argv

        def traced_start(entry: Callable[..., None], args: Sequence[Any], **kwargs: Any) -> int:
            return start_ranks(traced_entry, (entry, folder, *args), **kwargs)

        local_ranks.start_ranks = traced_start
        sys.argv = ["threefold", "train", *arguments, "--log.dir", f"{folder}/run"]
        from threefold.__main__ import main as command

        try:
            with contextlib.redirect_stdout(sys.stderr):
                Tracer().trace(command, "launcher")
        except SystemExit as stop:
            if stop.code:
                raise
        finally:
            local_ranks.start_ranks, sys.argv = start_ranks, before
        entered: dict[str, None] = {}
        loaded: dict[str, None] = {}
        for path in sorted(Path(folder).glob("*.json")):
            noted = json.loads(path.read_text())
            entered |= dict.fromkeys(noted["entered"])
            loaded |= dict.fromkeys(noted["loaded"])
    return [*entered], [module for module in loaded if module not in entered and _lines(module)]


def main(arguments: Sequence[str]) -> None:
    entered, only_loaded = traced(arguments)
    for module in entered:
        print(f"{_lines(module):5d}  {module}")
    print("loaded, and no function of them ran:", ", ".join(sorted(only_loaded)))
    print("from the YAML to the end of the first step:")
    for what, modules in (
        ("a function ran", entered),
        ("a function ran, or it was loaded", [*entered, *only_loaded]),
    ):
        tokens = sum(code_tokens(SOURCE / module) for module in modules)
        print(
            f"  {what}: {len(modules)} modules, {sum(map(_lines, modules)):,} lines, {tokens:,} code tokens"
        )


def _lines(module: str) -> int:
    return (SOURCE / module).read_text().count("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
