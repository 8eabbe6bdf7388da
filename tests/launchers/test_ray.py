"""The example for Ray on a Ray that is started here: two workers train, and learn what two ranks do."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

from launchers.sagemaker import PYTHON, ROOT
from ranks.runs import command, curve, prepare
from threefold.config.loading import load
from threefold.config.yaml_text import dump

RAY = list((ROOT / ".venv-launchers" / "lib").glob("python*/site-packages/ray"))
pytestmark = [
    pytest.mark.launchers,
    pytest.mark.timing,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not RAY, reason="no ray in .venv-launchers (make test-launchers)"),
]
KEYS = (
    "--mesh.dp",
    "2",
    "--mesh.device",
    "cpu",
    "--train.steps",
    "6",
    "--log.every",
    "1",
    "--log.dir",
)


def test_job_trains_as_ranks_do(tmp_path: Path) -> None:
    prepare(tmp_path)
    source = ("--data.source", str(tmp_path / "corpus"))
    alone = command(tmp_path, "train", "config.yaml", *source, *KEYS, str(tmp_path / "ranks"))
    assert alone.returncode == 0, alone.stderr
    keys = [key.removeprefix("--") for key in (*source, *KEYS, str(tmp_path / "workers"))]
    overrides = [*zip(keys[::2], keys[1::2], strict=True)]
    config = load(str(tmp_path / "config.yaml"), overrides, environ={}).config
    (tmp_path / "job.yaml").write_text(dump(config, nulls=False))
    # Ray is in the launchers' venv; torch and threefold are here.
    here = os.pathsep.join([str(ROOT / "src"), sysconfig.get_path("purelib")])
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:
        quiet = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "HOME": str(tmp_path),
            "RAY_TMPDIR": short,
        }
        env = {**os.environ, **quiet, "PYTHONPATH": here}
        told = {"capture_output": True, "text": True, "check": False, "timeout": 240}
        done = subprocess.run(
            [PYTHON, str(ROOT / "examples" / "ray_job.py"), "job.yaml"],
            cwd=tmp_path,
            env=env,
            **told,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert curve(tmp_path / "workers") == curve(tmp_path / "ranks")
