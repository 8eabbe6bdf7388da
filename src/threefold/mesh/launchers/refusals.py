"""Launchers that contradict one another or were left out: set-ups in which ranks would wait for ever or train alone."""

from __future__ import annotations

import json
from collections.abc import Mapping

from threefold.errors import ConfigError
from threefold.mesh.launchers.info import LaunchInfo, Variables


def refuse_contradiction(rank: int, world_size: int, outer: LaunchInfo) -> None:
    """Refuses RANK and WORLD_SIZE that are not what the launcher of this process says."""
    if (rank, world_size) == (outer.rank, outer.world_size):
        return
    raise ConfigError(
        f"RANK = {rank} and WORLD_SIZE = {world_size}, but {outer.launcher} says {outer.rank} of {outer.world_size}",
        expected="one answer: ranks that take one number twice wait for one another, or each trains alone",
        fix="unset RANK WORLD_SIZE LOCAL_RANK   (a job script or an outer shell has exported them)",
    )


def _started(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """What outer launchers have started one agent each for: (what says so, how many)."""
    found = []
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PET_NNODES"):
        count = environ.get(name, "")
        if count.isascii() and count.isdecimal():
            found.append((f"{name} = {count}", int(count)))
    hosts = _sagemaker_hosts(environ)
    if hosts:
        found.append((f"SM_HOSTS has {hosts} hosts", hosts))
    return found


def _sagemaker_hosts(environ: Mapping[str, str]) -> int:
    try:
        hosts = json.loads(environ.get("SM_HOSTS", "[]"))
    except ValueError:
        return 0
    return len(hosts) if isinstance(hosts, list) else 0


def refuse_lonely_agent(environ: Mapping[str, str], info: LaunchInfo) -> None:
    """Refuses torchruns that do not know of one another: each would train the whole run again."""
    if Variables(environ, "torchrun").number("GROUP_WORLD_SIZE") != 1:
        return
    for said, count in _started(environ):
        if count > 1:
            raise ConfigError(
                f"{said}, but this torchrun has {info.world_size} ranks on one host",
                expected="one torchrun for all of them: otherwise each trains the whole run by itself",
                fix="torchrun --nnodes=N --node-rank=I --master-addr=HOST ... on each host, or no torchrun: "
                "srun (mpirun) python -m threefold ...",
            )


def refuse_forgotten_launcher(environ: Mapping[str, str]) -> None:
    """Refuses to train on one host of several that were reserved."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if (
        "SLURM_JOB_ID" in environ
        and "SLURM_STEP_ID" not in environ
        and nodes.isascii()
        and nodes.isdecimal()
        and int(nodes) > 1
    ):
        raise ConfigError(
            f"this is a Slurm job of {nodes} nodes, but srun has not started this process",
            expected="one process for each rank on all of the nodes",
            fix="srun python -m threefold ...   in the job script, or: unset SLURM_JOB_ID   (to use this node only)",
        )
    hosts = _sagemaker_hosts(environ)
    if hosts > 1:
        raise ConfigError(
            f"SM_HOSTS has {hosts} hosts, but no launcher has started this process",
            expected="torchrun on each host: otherwise each trains the whole run by itself",
            fix='distribution={"torch_distributed": {"enabled": True}} in the estimator, Torchrun() in ModelTrainer, '
            "or: threefold submit sagemaker",
        )
