"""What may be imported without torch, and that the public names are there."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ranks.spawn import PRELOAD as SERVER_PRELOAD
from threefold.run.start import PRELOAD as RANK_PRELOAD

TORCH_FREE = [
    "threefold",
    "threefold.__main__",
    "threefold.commands.data",
    "threefold.commands.doctor",
    "threefold.commands.explain",
    "threefold.run.folder",
    "threefold.run.lock",
    "threefold.run.sources",
    "threefold.commands.submit",
    "threefold.checkpoint.boxes",
    "threefold.checkpoint.seal",
    "threefold.checkpoint.layout",
    "threefold.commands.main",
    "threefold.config",
    "threefold.config.rules",
    "threefold.config.loading",
    "threefold.config.text",
    "threefold.audit.digest",
    "threefold.audit.offences",
    "threefold.audit.lookup",
    "threefold.audit.row_losses",
    "threefold.audit.proof",
    "threefold.audit.record",
    "threefold.data.order",
    "threefold.data.rows.padded",
    "threefold.data.mixture",
    "threefold.data.draws",
    "threefold.data.rows.concat",
    "threefold.data.partition",
    "threefold.data.permutation",
    "threefold.data.store.prepare",
    "threefold.data.rows.packing",
    "threefold.data.store.resolve",
    "threefold.data.store.store",
    "threefold.data.text.joined",
    "threefold.data.text.listing",
    "threefold.data.text.source",
    "threefold.data.tokens",
    "threefold.doctor.gpu",
    "threefold.doctor.machine",
    "threefold.doctor.network",
    "threefold.doctor.packages",
    "threefold.doctor.ranks",
    "threefold.explain.answer",
    "threefold.explain.evidence",
    "threefold.explain.explain",
    "threefold.explain.known",
    "threefold.doctor.findings",
    "threefold.run.stall",
    "threefold.commands.report",
    "threefold.report.document",
    "threefold.report.verdict",
    "threefold.report.lanes",
    "threefold.report.server",
    "threefold.commands.view",
    "threefold.run.pulse",
    "threefold.errors",
    "threefold.commands.plan",
    "threefold.plan.accelerators",
    "threefold.plan.advise",
    "threefold.plan.duration",
    "threefold.plan.peak",
    "threefold.plan.traffic",
    "threefold.jobs.job",
    "threefold.jobs.entry",
    "threefold.jobs.kubernetes",
    "threefold.jobs.sagemaker",
    "threefold.jobs.slurm",
    "threefold.integrations.trackers",
    "threefold.mesh.environment",
    "threefold.mesh.launchers.info",
    "threefold.mesh.launchers.managed",
    "threefold.mesh.launchers.readers",
    "threefold.mesh.rendezvous_errors",
    "threefold.mesh.topology",
    "threefold.training.timeline",
    "threefold.why.said",
    "threefold.commands.why",
]


# A fork for each module: every one is imported into an interpreter that has imported none of the others, only the
# libraries that many of them use.
ALONE = """
import importlib, json, os, sys
import numpy.typing, pydantic, rich.console, ruamel.yaml, typer
found = {}
for module in sys.argv[1:]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        importlib.import_module(module)
        os.write(write, " ".join({"torch", "transformers"} & set(sys.modules)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        loaded = pipe.read()
    found[module] = loaded if os.waitpid(child, 0)[1] == 0 else "it cannot be imported"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, str]:
    """What each module has loaded that it should not."""
    done = subprocess.run([sys.executable, "-c", ALONE, *TORCH_FREE], timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_loads_no_torch(module: str, loaded: dict[str, str]) -> None:
    assert loaded[module] == ""


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['threefold', '--help']\n"
        "from threefold.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_public_names_are_there() -> None:
    import threefold

    for name in threefold.__all__:
        assert getattr(threefold, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = threefold.nothing


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("threefold.data.permutation", "Permutation"),
        ("threefold.data.streaming", "StreamingLoader"),
        ("threefold.integrations.huggingface", "Trainer"),
    ],
)
def test_documented_paths(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_preloaded_modules_are_there() -> None:
    """A server passes over a module that it cannot import; each rank would import it for itself."""
    ours = [name for name in (*SERVER_PRELOAD, *RANK_PRELOAD) if name.startswith("threefold.")]
    assert ours and [name for name in ours if find_spec(name) is None] == []
