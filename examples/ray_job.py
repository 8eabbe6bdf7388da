"""Trains a config by Ray Train, with one worker for each rank of its mesh.

    python examples/ray_job.py job.yaml                            on a Ray that it starts, or joins
    ray job submit --working-dir . -- python ray_job.py job.yaml   on a cluster

Paths in the config must be absolute, on a file system that all hosts share: a worker has a folder of its own. A worker
gets no signal, so a stop saves nothing. After a crash or a lost host Ray starts all of them again, and the run
continues from its newest checkpoint (checkpoint.every).
"""

import math
import sys
from pathlib import Path

import ruamel.yaml
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

RETRIES = 3
CONFIG = ruamel.yaml.YAML(typ="safe", pure=True).load(Path(sys.argv[1]))  # YAML 1.2: 1e-08 is a number
MESH = CONFIG["mesh"]
WORKERS = math.prod(MESH.get(axis) or 1 for axis in ("dp", "cp", "tp"))


def train_on_rank() -> None:
    import threefold

    threefold.train(CONFIG)


TorchTrainer(
    train_on_rank,
    torch_config=TorchConfig(timeout_s=MESH.get("timeout_s") or 600),
    scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=MESH.get("device") != "cpu"),
    run_config=RunConfig(
        storage_path=str(Path(CONFIG["log"]["dir"]).parent / "ray"),
        failure_config=FailureConfig(max_failures=RETRIES),
    ),
).fit()
