"""SageMaker's own training toolkit on this machine: the tree of files that a container gets, and the toolkit's command.

The toolkit runs in the launchers' venv; what it starts (torchrun and the job's script) comes from this interpreter's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ranks.runs import environment
from ranks.two_hosts import why_not as why_no_hosts

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-launchers" / "bin" / "python"
INSTANCE = "ml.g5.12xlarge"


def why_not() -> str | None:
    """Why the toolkit cannot run here, or None."""
    site = list(
        (ROOT / ".venv-launchers" / "lib").glob("python*/site-packages/sagemaker_training")
    )
    return (
        None
        if site and PYTHON.exists()
        else "no sagemaker-training in .venv-launchers (make test-launchers)"
    )


def lay_out(
    base: Path,
    *,
    request: Mapping[str, Any],
    source: bytes,
    host: str,
    hosts: Sequence[str],
    num_ranks: int,
    interface: str,
    channels: Mapping[str, Path],
) -> None:
    """Writes what SageMaker puts under /opt/ml of one host, as a CreateTrainingJob `request` asks for."""
    for folder in (
        "code",
        "model",
        "input/config",
        "input/data",
        "output/data",
        "output/intermediate",
        "checkpoints",
    ):
        (base / folder).mkdir(parents=True)
    unpacked = base / "source"
    unpacked.mkdir()
    (base / "sourcedir.tar.gz").write_bytes(source)
    with tarfile.open(base / "sourcedir.tar.gz") as tar:
        tar.extractall(
            unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    hyperparameters = {
        **request["HyperParameters"],
        "sagemaker_submit_directory": json.dumps(str(unpacked)),
        "sagemaker_region": json.dumps("us-east-1"),
        # The toolkit counts GPUs; without one it starts as many ranks as this says.
        "sagemaker_mpi_num_of_processes_per_host": json.dumps(num_ranks),
    }
    described = {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    }
    resources = {
        "current_host": host,
        "current_instance_type": INSTANCE,
        "current_group_name": "homogeneousCluster",
        "hosts": list(hosts),
        "instance_groups": [
            {
                "instance_group_name": "homogeneousCluster",
                "instance_type": INSTANCE,
                "hosts": list(hosts),
            }
        ],
        "network_interface_name": interface,
    }
    config = base / "input" / "config"
    (config / "hyperparameters.json").write_text(json.dumps(hyperparameters))
    (config / "inputdataconfig.json").write_text(json.dumps(dict.fromkeys(channels, described)))
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    for name, folder in channels.items():
        (base / "input" / "data" / name).symlink_to(folder, target_is_directory=True)


def toolkit_command() -> list[str]:
    """What the container's entry point runs."""
    return [str(PYTHON), "-c", "from sagemaker_training.cli.train import main; main()"]


def run_toolkit(folder: Path, base: Path) -> subprocess.CompletedProcess[str]:
    """The container's life, from its start to its end."""
    return subprocess.run(
        toolkit_command(),
        cwd=folder,
        env=toolkit_environment(folder, base),
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )


def toolkit_environment(folder: Path, base: Path) -> dict[str, str]:
    """The container's environment: its base, and a PATH where `torchrun` and `python` are this interpreter's."""
    return {
        **environment(folder),
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "AWS_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }


# --- the SDK's own drivers ----------------------------------------------------------------------------------------


def _drivers() -> Path | None:
    found = (ROOT / ".venv-launchers" / "lib").glob(
        "python*/site-packages/sagemaker/train/container_drivers"
    )
    return next(found, None)


def why_no_driver() -> str | None:
    """Why the drivers cannot run here, or None."""
    if why_not() is not None or _drivers() is None:
        return "no sagemaker-train in .venv-launchers (make test-launchers)"
    if why_no_hosts() is not None:
        return why_no_hosts()
    return (
        "this interpreter lies under /opt"
        if Path(sys.executable).resolve().is_relative_to("/opt")
        else None
    )


def lay_out_drivers(base: Path, *, num_ranks: int) -> None:
    """Adds the channels in which the SDK sends its drivers and the job's source."""
    drivers, data = _drivers(), base / "input" / "data"
    assert drivers is not None
    shutil.copytree(drivers, data / "sm_drivers")
    shutil.copytree(base / "source", data / "code")
    (data / "sm_drivers" / "sourcecode.json").write_text(
        json.dumps({"entry_script": "threefold_entry.py"})
    )
    (data / "sm_drivers" / "distributed.json").write_text(
        json.dumps({"process_count_per_node": num_ranks})
    )


def driver_command(base: Path, driver: str) -> list[str]:
    """What the SDK's training script does, with `base` as /opt/ml, in a mount namespace that ends with it."""
    script = (
        'set -e; mount -t tmpfs none /opt; mkdir /opt/ml; mount --bind "$0" /opt/ml; cd /opt/ml/input/data/code;'
        "python ../sm_drivers/scripts/environment.py > /dev/null; source /opt/ml/input/sm_training.env;"
        'exec python ../sm_drivers/distributed_drivers/"$1"'
    )
    return ["unshare", "--mount", "bash", "-c", script, str(base), driver]
