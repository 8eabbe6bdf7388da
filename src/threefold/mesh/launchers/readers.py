"""From an environment to a `LaunchInfo`: one reader per launcher, and which one decides if several have set variables.

torchrun inside another launcher decides alone: the outer one has started an agent on each host. Plain RANK and
WORLD_SIZE decide too, but must agree with the outer launcher. Otherwise the first of jsrun, Open MPI, MVAPICH2,
Horovod, Flux, PALS, MPICH, Slurm and Kubernetes decides; in this order, because mpirun starts its processes through
srun in a Slurm job, and several also set what MPICH's does. Launchers that contradict one another or were left out
are refused: ranks would wait forever or train alone.
"""

import dataclasses

from threefold.errors import ConfigError
from threefold.mesh.launchers import info as info_of
from threefold.mesh.launchers.clusters import reserved
from threefold.mesh.launchers.info import Environ, LaunchInfo, Variables, checked, is_number

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ALONE = "otherwise each trains the complete run alone"
_TORCHRUN = "torchrun --nproc_per_node=N -m threefold ..."


def read(environ: Environ) -> LaunchInfo:
    """This process according to the launcher's variables; `LaunchInfo()` if there are none.

    Raises:
        ConfigError: variables that are set in part, contradict one another or are not numbers; or a launcher that has
            started this process once per host, where it would train alone.
    """
    if "TORCHELASTIC_RUN_ID" in environ and ("RANK" in environ or "WORLD_SIZE" in environ):
        info = _read_torchrun(environ)
        _refuse_lonely_agent(environ, info)
        return info
    outer = next((each for reader in _READERS if (each := reader(environ)) is not None), None)
    plain = [name for name in _TORCH[:2] if name in environ]
    if plain and (outer is None or len(plain) == 2):
        info = _read_plain(environ, outer)
        if outer is not None:
            _refuse_contradiction(info.rank, info.world_size, outer)
        return info
    if outer is None:
        _refuse_forgotten_launcher(environ)
        return LaunchInfo()
    variables = Variables(environ, outer.launcher or "")
    rank = variables.number("RANK")
    world_size = variables.number("WORLD_SIZE")
    _refuse_contradiction(
        outer.rank if rank is None else rank,
        outer.world_size if world_size is None else world_size,
        outer,
    )
    return _with_rendezvous(environ, outer)


def _read_torchrun(environ: Environ) -> LaunchInfo:
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
        generation=f"start-{restart}"
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        else None,
    )
    return checked(info, "RANK", "WORLD_SIZE")


def _read_plain(environ: Environ, outer: LaunchInfo | None) -> LaunchInfo:
    """RANK, WORLD_SIZE and a master, set by hand, by an operator, or by a script around another launcher."""
    variables = Variables(environ, "torchrun")
    rank, world_size, port = _torch_numbers(variables)
    # deepspeed's launcher has another name for it.
    local_size = variables.number("LOCAL_WORLD_SIZE")
    local_rank = variables.number("LOCAL_RANK")
    local_size = variables.number("LOCAL_SIZE") if local_size is None else local_size
    if outer is None:
        job = reserved(environ)
        hosts = len(job[2]) if job is not None and world_size % len(job[2]) == 0 else 1
        # A PyTorchJob's RANK is the pod's; where nothing indicates other machines, there are none.
        one_per_pod = "KUBERNETES_SERVICE_HOST" in environ and local_rank is None
        local_world_size = (
            local_size if local_size is not None else 1 if one_per_pod else world_size // hosts
        )
        host = environ.get("SM_CURRENT_HOST", "")
        own = rank % max(1, local_world_size)
        outer = LaunchInfo(local_rank=own, launcher="environment", host=host)
    else:
        local_world_size = local_size if local_size is not None else outer.local_world_size
    info = dataclasses.replace(
        outer,
        rank=rank,
        world_size=world_size,
        local_rank=outer.local_rank if local_rank is None else local_rank,
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
    )
    return checked(info, "RANK", "WORLD_SIZE")


def _torch_numbers(variables: Variables) -> tuple[int, int, int]:
    present = [name for name in _TORCH[:2] if name in variables.environ]
    variables.require(_TORCH, fix=f"start with {_TORCHRUN}, or: unset {' '.join(present)}")
    return (
        variables.number("RANK") or 0,
        variables.number("WORLD_SIZE") or 0,
        variables.port() or 0,
    )


# Launcher, its name in words, and what its variables for rank, size, local rank and local size begin with.
_MPIS = (
    ("jsrun", "jsrun", "JSM_NAMESPACE"),
    ("open-mpi", "Open MPI's mpirun", "OMPI_COMM_WORLD"),
    ("mvapich", "MVAPICH2's mpirun", "MV2_COMM_WORLD"),
    ("horovod", "horovodrun", "HOROVOD"),
)


def _read_mpi(environ: Environ) -> LaunchInfo | None:
    for kind, title, prefix in _MPIS:
        names = [f"{prefix}_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        if any(name in environ for name in names[:2]):
            return _read_four(environ, kind, title, names)
    return None


def _read_four(environ: Environ, kind: str, title: str, names: list[str]) -> LaunchInfo:
    """From the variables of rank, world size, local rank and local world size."""
    fix = f"start with mpirun -n N python -m threefold ..., or: unset {' '.join(names)}"
    rank, world_size, local_rank, local_world_size = Variables(environ, title).needed(
        names, fix=fix
    )
    info = LaunchInfo(rank, world_size, local_rank, local_world_size, launcher=kind)
    return checked(info, names[0], names[1])


def _read_flux(environ: Environ) -> LaunchInfo | None:
    """A task of `flux run`, unless it is the only one, as of a script that starts ranks itself."""
    if "FLUX_TASK_RANK" not in environ:
        return None
    names = ["FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"]
    fix = f"start with flux run -n N python -m threefold ..., or: unset {' '.join(names)}"
    rank, world_size, local_rank, hosts = Variables(environ, "flux run").needed(names, fix=fix)
    if world_size == 1:
        return None
    if not hosts or world_size % hosts:
        raise ConfigError(
            f"FLUX_JOB_SIZE = {world_size} tasks on FLUX_JOB_NNODES = {hosts} hosts",
            expected="the same number of tasks on each host",
            fix="flux run -N HOSTS --tasks-per-node=N python -m threefold ...",
        )
    info = LaunchInfo(rank, world_size, local_rank, world_size // hosts, launcher="flux")
    return checked(info, names[0], names[1])


def _read_pals(environ: Environ) -> LaunchInfo | None:
    """A rank of HPE's mpiexec (PALS)."""
    if "PALS_RANKID" not in environ:
        return None
    names = ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"]
    return _read_four(environ, "pals", "mpiexec of PALS", names)


def _read_mpich(environ: Environ) -> LaunchInfo | None:
    """MPICH's and Intel MPI's mpirun (Hydra)."""
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return None
    # srun and flux set PMI_RANK too; their own variables then say more.
    if (
        "SLURM_STEP_ID" in environ or "FLUX_TASK_RANK" in environ
    ) and "MPI_LOCALRANKID" not in environ:
        return None
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    return _read_four(environ, "mpich", "MPICH's mpirun", names)


def _read_slurm(environ: Environ) -> LaunchInfo | None:
    """A task of srun; not a batch script, a shell in an allocation, or a step of one task."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    variables = Variables(environ, "srun")
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    fix = "start with srun python -m threefold ... in the job, or: unset SLURM_STEP_ID"
    rank, world_size, local_rank = variables.needed(
        ["SLURM_PROCID", size_name, "SLURM_LOCALID"], fix=fix
    )
    if world_size == 1:
        return None
    node = variables.number("SLURM_NODEID") or 0
    local_world_size = info_of.tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
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
    return checked(info, "SLURM_PROCID", size_name)


def _read_kubernetes(environ: Environ) -> LaunchInfo | None:
    """A pod of Kubeflow's PyTorchJob or TrainJob that runs one process."""
    if "PET_NODE_RANK" not in environ and "PET_NNODES" not in environ:
        return None
    variables = Variables(environ, "Kubeflow")
    rank, world_size = variables.needed(
        ["PET_NODE_RANK", "PET_NNODES"],
        fix="let a PyTorchJob or a TrainJob start the pod: threefold submit kubernetes",
    )
    per_pod = environ.get("PET_NPROC_PER_NODE", "1")
    if per_pod not in ("1", "auto", "cpu", "gpu"):
        raise ConfigError(
            f"PET_NPROC_PER_NODE = {per_pod}, but this process is the only one of its pod",
            expected="torchrun as the pod's command, if a pod has several ranks",
            fix="command: [torchrun, -m, threefold, train, ...]   (torchrun reads the PET_ variables)",
        )
    if world_size == 1:
        return None
    info = LaunchInfo(rank, world_size, launcher="kubernetes")
    return checked(info, "PET_NODE_RANK", "PET_NNODES")


def _with_rendezvous(environ: Environ, info: LaunchInfo) -> LaunchInfo:
    """The info with the place where its ranks meet; for several hosts of an mpirun, the user must name it."""
    variables = Variables(environ, info.launcher or "")
    own_port = variables.port()
    address, port = _rendezvous_of(variables, info)
    address = environ.get("MASTER_ADDR") or address
    port = own_port or port
    if address is None:
        raise ConfigError(
            f"{info.world_size} ranks on several hosts, but MASTER_ADDR is not set",
            expected=f"the name or address of rank 0's host, which {info.launcher} does not provide",
            fix="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...   (Open MPI), -genv MASTER_ADDR HOST (MPICH), "
            "flux run --env=MASTER_ADDR=HOST, mpiexec --env MASTER_ADDR=HOST (PALS), with the first host's name",
        )
    return dataclasses.replace(
        info, master_addr=address, master_port=port or info_of.DEFAULT_PORT
    )


def _rendezvous_of(variables: Variables, info: LaunchInfo) -> tuple[str | None, int | None]:
    """(rank 0's host, port), as far as the launcher's own variables provide them."""
    environ = variables.environ
    if info.launcher == "slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        job, step = (variables.number(f"SLURM_{part}_ID") or 0 for part in ("JOB", "STEP"))
        return info_of.first_host(nodes) or None, info_of.port_of_job(job, step)
    if info.launcher == "kubernetes":
        return environ.get("PET_MASTER_ADDR") or None, variables.number("PET_MASTER_PORT")
    if info.local_world_size == info.world_size:
        namespace = "".join(
            character
            for character in environ.get("PMIX_NAMESPACE", "")
            if character.isdecimal()
        )
        return "127.0.0.1", info_of.port_of_job(int(namespace)) if namespace else None
    # With MPI in a job whose hosts are known, rank 0 is on the first.
    address, _, port = environ.get("AZ_BATCH_MASTER_NODE", "").partition(":")
    if address:
        return address, int(port) if is_number(port) else None
    listed = reserved(environ)
    number = "".join(
        filter(
            str.isdecimal,
            environ.get("LSB_JOBID", "") or environ.get("PBS_JOBID", "").split(".")[0],
        )
    )
    return (listed[2][0] or None if listed is not None else None), info_of.port_of_job(
        int(number)
    ) if number else None


def _refuse_contradiction(rank: int, world_size: int, outer: LaunchInfo) -> None:
    if (rank, world_size) == (outer.rank, outer.world_size):
        return
    outers = f"{outer.launcher} started rank {outer.rank} of {outer.world_size}"
    raise ConfigError(
        f"RANK = {rank} and WORLD_SIZE = {world_size}, but {outers}",
        expected="the same numbers: two ranks with the same number wait for one another, or each trains alone",
        fix="unset RANK WORLD_SIZE LOCAL_RANK   (a job script or an outer shell has exported them)",
    )


def _refuse_lonely_agent(environ: Environ, info: LaunchInfo) -> None:
    """Refuses torchruns that do not know of one another: each would train the complete run."""
    if Variables(environ, "torchrun").number("GROUP_WORLD_SIZE") != 1:
        return
    names = [f"{prefix}_SIZE" for _, _, prefix in _MPIS]
    names += ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "PET_NNODES", "FLUX_JOB_SIZE"]
    # How many agents the outer launchers have started, and the variable with that number.
    started = {
        f"{name} = {environ[name]}": int(environ[name])
        for name in names
        if is_number(environ.get(name, ""))
    }
    if (job := reserved(environ)) is not None:
        started |= {f"{job[1].variable} has {len(job[2])} hosts": len(job[2])}
    for source, count in started.items():
        if count > 1:
            raise ConfigError(
                f"{source}, but this torchrun has {info.world_size} ranks on one host",
                expected=f"one torchrun for all of them: {_ALONE}",
                fix="torchrun --nnodes=N --node-rank=I --master-addr=HOST ... on each host, or no torchrun: "
                "srun (mpirun) python -m threefold ...",
            )


def _refuse_forgotten_launcher(environ: Environ) -> None:
    """Refuses to train on one of several reserved hosts."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    in_job = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    if in_job and is_number(nodes) and int(nodes) > 1:
        raise ConfigError(
            f"this is a Slurm job of {nodes} nodes, but srun has not started this process",
            expected="one process for each rank on all of the nodes",
            fix="srun python -m threefold ...   in the job script, or: unset SLURM_JOB_ID   (to use only this node)",
        )
    if (job := reserved(environ)) is not None:
        _, cluster, hosts = job
        value = environ.get(cluster.variable, "")
        count = (
            f"= {value}: {cluster.several}" if cluster.several else f"has {len(hosts)} hosts"
        )
        count = (
            f"= {value} hosts" if value == str(len(hosts)) and not cluster.several else count
        )
        raise ConfigError(
            f"{cluster.variable} {count}, but no launcher has started this process",
            expected=f"torchrun on each host: {_ALONE}"
            if "torchrun" in cluster.fix.lower()
            else f"ranks: {_ALONE}",
            fix=f"{cluster.fix}   (to use only this one: unset {cluster.variable})",
        )


# In this order: mpirun starts its processes through srun in a Slurm job, and several also set what MPICH's does.
_READERS = (_read_mpi, _read_flux, _read_pals, _read_mpich, _read_slurm, _read_kubernetes)
