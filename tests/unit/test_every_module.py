"""Every module can be imported on the versions that are here: none of them hides an import that they do not have."""

from __future__ import annotations

from pathlib import Path

from ranks import runs

# In one process, forked from one that has imported torch and transformers: most of the time goes into these.
CODE = """
import importlib.util, pkgutil, threefold

names = [module.name for module in pkgutil.walk_packages(threefold.__path__, "threefold.")]
# Kernels for CUDA, where triton comes with torch.
kernels = {"threefold.optim.fused_kernel", "threefold.training.loss_kernel"}
without = set() if importlib.util.find_spec("triton") else kernels
for name in names:
    if not name.endswith("__main__") and name not in without:
        importlib.import_module(name)
print(len(names))
"""

# Also inside of functions: most benchmarks of a GPU run nowhere else.
IMPORTS = """
import ast, importlib, importlib.util, pathlib, sys

for path in sorted(path for folder in sys.argv[1:] for path in pathlib.Path(folder).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("threefold"):
            continue
        if importlib.util.find_spec(node.module) is None:
            print(f"{path}:{node.lineno}: {node.module}")
        elif importlib.util.find_spec("triton") or not node.module.endswith("_kernel"):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                part = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}")
                if not (part or hasattr(module, name)):
                    print(f"{path}:{node.lineno}: {node.module}.{name}")
"""


def test_every_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "every.py").write_text(CODE)
    done = runs.script(tmp_path, "every.py")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300


def test_what_programs_import_is_there(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text(IMPORTS)
    folders = [
        str(Path(__file__).parents[2] / name)
        for name in ("benchmarks", "examples", "tools", "tests/gpu")
    ]
    done = runs.script(tmp_path, "imports.py", *folders)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "a.py").write_text(
        "from threefold.errors import visible, nothing\nfrom threefold.gone import one\n"
    )
    done = runs.script(tmp_path, "imports.py", str(stale))
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == f"{stale}/a.py:1: threefold.errors.nothing\n{stale}/a.py:2: threefold.gone\n"
    )
