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


def test_every_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "every.py").write_text(CODE)
    done = runs.script(tmp_path, "every.py")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300
