"""What may be imported without torch, and that the public names are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = [
    "threefold",
    "threefold.__main__",
    "threefold.app.data",
    "threefold.app.doctor",
    "threefold.app.explain",
    "threefold.app.run_folder",
    "threefold.app.run_lock",
    "threefold.app.submit",
    "threefold.checkpoint.index",
    "threefold.checkpoint.integrity",
    "threefold.checkpoint.layout",
    "threefold.cli.main",
    "threefold.cli.submit",
    "threefold.config",
    "threefold.config_checks",
    "threefold.config_loading",
    "threefold.config_problems",
    "threefold.config_text",
    "threefold.data.audit",
    "threefold.data.audit_findings",
    "threefold.data.audit_lookup",
    "threefold.data.audit_proof",
    "threefold.data.audit_record",
    "threefold.data.best_fit",
    "threefold.data.cursor",
    "threefold.data.mixed_rows",
    "threefold.data.mixture",
    "threefold.data.packing",
    "threefold.data.partition",
    "threefold.data.permutation",
    "threefold.data.prepare",
    "threefold.data.skip",
    "threefold.data.source",
    "threefold.data.store",
    "threefold.data.text",
    "threefold.data.tokens",
    "threefold.doctor.checks_gpu",
    "threefold.doctor.checks_machine",
    "threefold.doctor.checks_network",
    "threefold.doctor.checks_packages",
    "threefold.doctor.checks_ranks",
    "threefold.doctor.explain",
    "threefold.doctor.findings",
    "threefold.doctor.stall",
    "threefold.errors",
    "threefold.integrations.clusters",
    "threefold.integrations.clusters_entry",
    "threefold.integrations.clusters_kubernetes",
    "threefold.integrations.clusters_sagemaker",
    "threefold.integrations.clusters_slurm",
    "threefold.integrations.terminal",
    "threefold.mesh.launch",
    "threefold.mesh.launch_info",
    "threefold.mesh.launch_managed",
    "threefold.mesh.launch_readers",
    "threefold.mesh.launch_refusals",
    "threefold.mesh.meeting_errors",
    "threefold.mesh.topology",
    "threefold.training.metrics",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['threefold', '--help']\n"
        "from threefold.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_public_names_are_there() -> None:
    import threefold

    for name in threefold.__all__:
        assert getattr(threefold, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = threefold.nothing
