"""From an environment to a `LaunchInfo`: one reader for each launcher, and who speaks where several have set variables.

torchrun inside another launcher decides alone: the outer one has started an agent on each host. Plain RANK and
WORLD_SIZE decide too, but must then agree with what the outer launcher says. Otherwise Open MPI, MPICH, Slurm and
Kubernetes speak, in this order: mpirun starts its own processes through srun where there is a Slurm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from threefold.errors import ConfigError
from threefold.mesh.launchers.info import (
    DEFAULT_PORT,
    LaunchInfo,
    Variables,
    checked,
    first_host,
    port_of_job,
    tasks_of_node,
)
from threefold.mesh.launchers.refusals import refuse_contradiction, refuse_forgotten_launcher, refuse_lonely_agent

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = "torchrun --nproc_per_node=N -m threefold ..."


def read(environ: Mapping[str, str]) -> LaunchInfo:
    """What the launcher's variables say; `LaunchInfo()` where there are none.

    Raises:
        ConfigError: variables that are half set, contradict one another or are no numbers; or a launcher that has
            started this process once for each host, where it would train alone.
    """
    if "TORCHELASTIC_RUN_ID" in environ and ("RANK" in environ or "WORLD_SIZE" in environ):
        info = _read_torchrun(environ)
        refuse_lonely_agent(environ, info)
        return info
    outer = _outer(environ)
    plain = [name for name in _TORCH[:2] if name in environ]
    if plain and (outer is None or len(plain) == 2):
        info = _read_plain(environ, outer)
        if outer is not None:
            refuse_contradiction(info.rank, info.world_size, outer)
        return info
    if outer is None:
        refuse_forgotten_launcher(environ)
        return LaunchInfo()
    variables = Variables(environ, outer.launcher or "")
    rank, world_size = variables.number("RANK"), variables.number("WORLD_SIZE")
    refuse_contradiction(
        outer.rank if rank is None else rank, outer.world_size if world_size is None else world_size, outer
    )
    return _with_rendezvous(environ, outer)


def _outer(environ: Mapping[str, str]) -> LaunchInfo | None:
    readers: tuple[Callable[[Mapping[str, str]], LaunchInfo | None], ...] = (
        _read_open_mpi,
        _read_mpich,
        _read_slurm,
        _read_kubernetes,
    )
    return next((info for reader in readers if (info := reader(environ)) is not None), None)


def _read_torchrun(environ: Mapping[str, str]) -> LaunchInfo:
    variables = Variables(environ, "torchrun")
    rank, world_size, port = _torch_numbers(variables)
    restart = variables.number("TORCHELASTIC_RESTART_COUNT") or 0
    local_world_size = variables.number("LOCAL_WORLD_SIZE") or world_size
    local_rank = variables.number("LOCAL_RANK")
    info = LaunchInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank if local_rank is not None else rank % max(1, local_world_size),
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
        launcher="torchrun",
        host=environ.get("SM_CURRENT_HOST", ""),
        restart=restart,
        max_restarts=variables.number("TORCHELASTIC_MAX_RESTARTS") or 0,
        generation=f"start-{restart}" if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None,
    )
    return checked(info, rank_name="RANK", world_name="WORLD_SIZE")


def _read_plain(environ: Mapping[str, str], outer: LaunchInfo | None) -> LaunchInfo:
    """RANK, WORLD_SIZE and a master, set by hand, by an operator, or by a script around another launcher."""
    variables = Variables(environ, "torchrun")
    rank, world_size, port = _torch_numbers(variables)
    given, local_rank = variables.number("LOCAL_WORLD_SIZE"), variables.number("LOCAL_RANK")
    if given is not None:
        local_world_size = given
    elif outer is not None:
        local_world_size = outer.local_world_size
    else:
        # A PyTorchJob's RANK is the pod's; elsewhere nothing says that there are other machines.
        local_world_size = 1 if "KUBERNETES_SERVICE_HOST" in environ and local_rank is None else world_size
    if local_rank is None:
        local_rank = outer.local_rank if outer is not None else rank % max(1, local_world_size)
    info = LaunchInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
        launcher=outer.launcher if outer is not None else "environment",
        host=outer.host if outer is not None else environ.get("SM_CURRENT_HOST", ""),
        restart=outer.restart if outer is not None else 0,
        own_device=outer.own_device if outer is not None else False,
    )
    return checked(info, rank_name="RANK", world_name="WORLD_SIZE")


def _torch_numbers(variables: Variables) -> tuple[int, int, int]:
    environ = variables.environ
    present = [name for name in _TORCH[:2] if name in environ]
    missing = [name for name in _TORCH if name not in environ]
    if missing:
        raise ConfigError(
            f"{' and '.join(present)} set, but {' and '.join(missing)} not",
            expected="all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (set by a launcher), or none of them",
            fix=f"start with {_TORCHRUN}, or: unset {' '.join(present)}",
        )
    return variables.number("RANK") or 0, variables.number("WORLD_SIZE") or 0, _port(variables) or 0


def _port(variables: Variables) -> int | None:
    port = variables.number("MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise ConfigError(
            f"MASTER_PORT = {port} is no port",
            expected="a number from 1 to 65535",
            fix=f"export MASTER_PORT={DEFAULT_PORT}",
        )
    return port


def _read_open_mpi(environ: Mapping[str, str]) -> LaunchInfo | None:
    names = [f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not any(name in environ for name in names[:2]):
        return None
    rank, world_size, local_rank, local_world_size = Variables(environ, "Open MPI's mpirun").needed(
        names, fix=f"start with mpirun -n N python -m threefold ..., or: unset {' '.join(names)}"
    )
    info = LaunchInfo(rank, world_size, local_rank, local_world_size, launcher="open-mpi")
    return checked(info, rank_name=names[0], world_name=names[1])


def _read_mpich(environ: Mapping[str, str]) -> LaunchInfo | None:
    """MPICH's and Intel MPI's mpirun (Hydra)."""
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return None
    # srun's own PMI sets PMI_RANK too; Slurm then says more.
    if "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ:
        return None
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    rank, world_size, local_rank, local_world_size = Variables(environ, "MPICH's mpirun").needed(
        names, fix=f"start with mpirun -n N python -m threefold ..., or: unset {' '.join(names[:2])}"
    )
    info = LaunchInfo(rank, world_size, local_rank, local_world_size, launcher="mpich")
    return checked(info, rank_name=names[0], world_name=names[1])


def _read_slurm(environ: Mapping[str, str]) -> LaunchInfo | None:
    """A task of srun. A batch script and a shell in an allocation are none, nor is a step of one task."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    variables = Variables(environ, "srun")
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    fix = "start with srun python -m threefold ... in the job, or: unset SLURM_STEP_ID"
    rank, world_size, local_rank = variables.needed(["SLURM_PROCID", size_name, "SLURM_LOCALID"], fix=fix)
    if world_size == 1:
        return None
    node = variables.number("SLURM_NODEID") or 0
    local_world_size = tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
    if local_world_size is None:
        local_world_size = variables.number("SLURM_NTASKS_PER_NODE") or world_size
    devices = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")
    info = LaunchInfo(
        rank,
        world_size,
        local_rank,
        local_world_size,
        launcher="slurm",
        host=environ.get("SLURMD_NODENAME", ""),
        restart=variables.number("SLURM_RESTART_COUNT") or 0,
        own_device=any(name in environ for name in devices),
    )
    return checked(info, rank_name="SLURM_PROCID", world_name=size_name)


def _read_kubernetes(environ: Mapping[str, str]) -> LaunchInfo | None:
    """A pod of Kubeflow's PyTorchJob or TrainJob that runs one process."""
    if "PET_NODE_RANK" not in environ and "PET_NNODES" not in environ:
        return None
    variables = Variables(environ, "Kubeflow")
    rank, world_size = variables.needed(
        ["PET_NODE_RANK", "PET_NNODES"], fix="let a PyTorchJob or a TrainJob start the pod: threefold submit kubernetes"
    )
    per_pod = environ.get("PET_NPROC_PER_NODE", "1")
    if per_pod not in ("1", "auto", "cpu", "gpu"):
        raise ConfigError(
            f"PET_NPROC_PER_NODE = {per_pod}, but this process is the only one of its pod",
            expected="torchrun as the pod's command, where a pod has several ranks",
            fix="command: [torchrun, -m, threefold, train, ...]   (torchrun reads the PET_ variables)",
        )
    if world_size == 1:
        return None
    info = LaunchInfo(rank, world_size, launcher="kubernetes")
    return checked(info, rank_name="PET_NODE_RANK", world_name="PET_NNODES")


def _with_rendezvous(environ: Mapping[str, str], info: LaunchInfo) -> LaunchInfo:
    """The info with where its ranks meet; several hosts of an mpirun need the user's word."""
    variables = Variables(environ, info.launcher or "")
    own_port = _port(variables)
    address, port = _rendezvous_of(variables, info)
    address, port = environ.get("MASTER_ADDR") or address, own_port or port
    if address is None:
        raise ConfigError(
            f"{info.world_size} ranks on several hosts, and no MASTER_ADDR",
            expected=f"the name or address of rank 0's host: {info.launcher} does not tell it",
            fix="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...   (Open MPI), -genv MASTER_ADDR HOST (MPICH), "
            "with the first host's name",
        )
    return dataclasses.replace(info, master_addr=address, master_port=port or DEFAULT_PORT)


def _rendezvous_of(variables: Variables, info: LaunchInfo) -> tuple[str | None, int | None]:
    """(rank 0's host, port), as far as the launcher's own variables say."""
    environ = variables.environ
    if info.launcher == "slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        job, step = (variables.number(f"SLURM_{part}_ID") or 0 for part in ("JOB", "STEP"))
        return first_host(nodes) or None, port_of_job(job, step)
    if info.launcher == "kubernetes":
        return environ.get("PET_MASTER_ADDR") or None, variables.number("PET_MASTER_PORT")
    if info.local_world_size == info.world_size:
        namespace = "".join(character for character in environ.get("PMIX_NAMESPACE", "") if character.isdecimal())
        return "127.0.0.1", port_of_job(int(namespace)) if namespace else None
    return None, None
