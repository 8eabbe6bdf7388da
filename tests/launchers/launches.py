"""Every launcher that can be had here, each with a program of four ranks (or as many as are asked for).

The program is either what prints its place (`who.py`), or a short run of the default model. The tests compare the
places with what is expected, and some runs' losses with those of the run that the command launches itself;
`docs/generate_launchers.py` makes a table of all runs. Several hosts are network namespaces of this machine
(`ranks.two_hosts`).
"""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launchers import sagemaker, slurm
from launchers.processes import free_port
from ranks.runs import environment
from ranks.two_hosts import Host, hosts
from ranks.two_hosts import why_not as why_no_hosts
from threefold.commands import submit
from threefold.jobs import kubernetes
from threefold.jobs import sagemaker as clusters_sagemaker
from threefold.jobs.job import ranks_of
from threefold.jobs.kubernetes import KubernetesSettings
from threefold.jobs.sagemaker import SageMakerSettings

PYTHON = sys.executable
WHO = Path(__file__).parent / "who.py"
BIN = Path(PYTHON).parent
STEPS = 5
MESH = {"mesh.dp": "2", "mesh.tp": "2"}
SHORT = {
    "train.steps": str(STEPS),
    "train.global_batch": "8",
    "data.seq_len": "64",
    "log.every": "1",
    "log.sample_tokens": "0",
    "mesh.timeout_s": "60",
    "mesh.device": "cpu",
}
_LONGEST_S = 150


class Start(Protocol):
    """Runs a program in a folder to its end; returns the exit code and what was printed."""

    def __call__(self, folder: Path, program: Program, num_ranks: int) -> tuple[int, str]: ...


@dataclass(frozen=True)
class Program:
    """What a launcher starts on each rank.

    Attributes:
        output: the run's folder, or the folder of `who.py`.
        mesh: keys of the mesh of a run; None for `who.py`.
        config: the run's config in the folder where it is started; empty for the default model on its default data.
    """

    output: Path
    mesh: Mapping[str, str] | None = None
    config: str = ""

    def arguments(self) -> list[str]:
        """Behind the interpreter's or torchrun's name."""
        if self.mesh is None:
            return [str(WHO), str(self.output)]
        keys = {**SHORT, **self.mesh, "log.dir": str(self.output)}
        flags = [part for key, value in keys.items() for part in (f"--{key}", value)]
        return ["-m", "threefold", "train", *([self.config] if self.config else []), *flags]


def two(run: Path) -> Program:
    """A run of two ranks, on the tests' small model and corpus."""
    return Program(run, {"mesh.dp": "2"}, config="config.yaml")


@dataclass(frozen=True)
class Launch:
    """One way to start a program.

    Attributes:
        shown: the command of the run, as a reader would type it.
        hosts: machines that it runs on.
        why_not: why it cannot be started here, or None.
        launcher: as `environment.current()` names it.
        own_mesh: the launcher's own sizes are the mesh.
    """

    shown: str
    hosts: int
    why_not: Callable[[], str | None]
    start: Start
    launcher: str | None
    own_mesh: bool = False

    def train(self, folder: Path, run: Path) -> tuple[int, str]:
        """The short run, on MESH."""
        return self.start(folder, Program(run, {} if self.own_mesh else MESH), 4)


def _run(
    command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment(folder), "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    return done.returncode, done.stdout


def _on_hosts(
    folder: Path, command_of: Callable[[int, list[Host]], tuple[list[str], dict[str, str]]]
) -> tuple[int, str]:
    """Starts a command on each of two hosts and waits for both."""
    outputs = [folder / f"host-{number}.txt" for number in range(2)]
    with hosts("tfrun", 2) as both:
        started = []
        for number, host in enumerate(both):
            command, env = command_of(number, both)
            env = {**environment(folder), "OMP_NUM_THREADS": "1", **env}
            started.append(host.start(command, cwd=folder, env=env, output=outputs[number]))
        try:
            codes = [process.wait(_LONGEST_S) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    return max(codes, key=abs), "\n".join(path.read_text() for path in outputs)


def _always() -> str | None:
    return None


def _needs(program: str, package: str) -> Callable[[], str | None]:
    return lambda: None if shutil.which(program) else f"no {program} here (Debian: {package})"


# --- one host -----------------------------------------------------------------------------------------------------


def _self(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    return _run([PYTHON, *program.arguments()], folder)


def _torchrun(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    place = ["--nproc-per-node", str(num_ranks), "--master-port", str(free_port())]
    return _run([str(BIN / "torchrun"), *place, *program.arguments()], folder)


def _torchrun_elastic(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    place = ["--nnodes", "1:1", "--nproc-per-node", str(num_ranks)]
    place += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return _run([str(BIN / "torchrun"), *place, *program.arguments()], folder)


def _no_accelerate() -> str | None:
    return (
        None if (BIN / "accelerate").exists() else "no accelerate here (pip install accelerate)"
    )


def _accelerate(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    sizes = {"dp_replicate": str(num_ranks // 2), "dp_shard": "1", "tp": "2", "cp": "1"}
    place = [
        "--num_processes",
        str(num_ranks),
        "--main_process_port",
        str(free_port()),
        "--mixed_precision",
        "no",
    ]
    place += [
        "--num_machines",
        "1",
        "--dynamo_backend",
        "no",
        "--use_fsdp",
        "--fsdp_version",
        "2",
    ]
    place.append("--use_parallelism_config")
    place += [
        part
        for axis, size in sizes.items()
        for part in (f"--parallelism_config_{axis}_size", size)
    ]
    return _run([str(BIN / "accelerate"), "launch", *place, *program.arguments()], folder)


def _open_mpi(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    # Two ranks would each be bound to a core, which other tests use too.
    place = [
        "mpirun.openmpi",
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        str(num_ranks),
    ]
    return _run([*place, PYTHON, *program.arguments()], folder)


def _mpich(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    place = ["mpirun.mpich", "-n", str(num_ranks)]
    return _run(
        [*place, PYTHON, *program.arguments()], folder, {"MASTER_PORT": str(free_port())}
    )


def _sagemaker_job(
    program: Program, num_hosts: int, num_ranks: int
) -> tuple[Mapping[str, Any], bytes]:
    """The request and the source: our own for a run, those of a user's script for `who.py`."""
    if program.mesh is None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.add(WHO, WHO.name)
        settings: dict[str, Any] = {
            "sagemaker_program": WHO.name,
            "sagemaker_torch_distributed_enabled": True,
            "sagemaker_instance_type": sagemaker.INSTANCE,
            "sagemaker_job_name": "test",
            "sagemaker_container_log_level": 20,
        }
        return {
            "HyperParameters": {key: json.dumps(value) for key, value in settings.items()}
        }, packed.getvalue()
    keys = {
        **SHORT,
        **program.mesh,
        **({"log.dir": str(program.output)} if num_hosts > 1 else {}),
    }
    config = submit.read_config(None, list(keys.items()))
    job = ranks_of(config.mesh, num_hosts=num_hosts, per_host=num_ranks // num_hosts)
    options = SageMakerSettings(
        name="test",
        image="image",
        role="role",
        instance_type=sagemaker.INSTANCE,
        output="s3://bucket/prefix",
    )
    return clusters_sagemaker.request(
        job, options, region="us-east-1"
    ), clusters_sagemaker.archive(config, options)


def _sagemaker_tree(
    base: Path,
    host: str,
    all_hosts: list[str],
    interface: str,
    program: Program,
    num_ranks: int,
) -> dict[str, str]:
    """Lays out one host's tree; returns variables of the toolkit's environment."""
    request, source = _sagemaker_job(program, len(all_hosts), num_ranks)
    sagemaker.lay_out(
        base,
        request=request,
        source=source,
        host=host,
        hosts=all_hosts,
        num_ranks=num_ranks // len(all_hosts),
        interface=interface,
        channels={},
    )
    # The toolkit hands hyperparameters, not arguments, to a user's script.
    return {"WHO_FOLDER": str(program.output)}


def _sagemaker(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    base = folder / f"{program.output.name}-ml"
    variables = _sagemaker_tree(
        base, socket.gethostname(), [socket.gethostname()], "lo", program, num_ranks
    )
    ended = _run(
        sagemaker.toolkit_command(),
        folder,
        {**sagemaker.toolkit_environment(folder, base), **variables},
    )
    if program.mesh is not None:
        program.output.symlink_to(base / "checkpoints")
    return ended


# --- two hosts ----------------------------------------------------------------------------------------------------


def _torchrun_on_hosts(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    def command(number: int, both: list[Host]) -> tuple[list[str], dict[str, str]]:
        place = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            str(num_ranks // 2),
            "--node-rank",
            str(number),
        ]
        place += ["--master-addr", both[0].hostname, "--master-port", "29500"]
        return [str(BIN / "torchrun"), *place, *program.arguments()], {}

    return _on_hosts(folder, command)


def _torchrun_elastic_on_hosts(
    folder: Path, program: Program, num_ranks: int
) -> tuple[int, str]:
    def command(number: int, both: list[Host]) -> tuple[list[str], dict[str, str]]:
        place = ["--nnodes", "2:2", "--nproc-per-node", str(num_ranks // 2)]
        place += ["--rdzv-backend", "c10d", "--rdzv-id", "test"]
        place += [
            "--rdzv-endpoint",
            f"{both[0].hostname}:29400",
            "--local-addr",
            both[number].address,
        ]
        place += ["--rdzv-conf", f"is_host={'true' if number == 0 else 'false'}"]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [str(BIN / "torchrun"), *place, *program.arguments()], env

    return _on_hosts(folder, command)


def _pytorch_job(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    """The pods of our own manifest, with the variables that Kubeflow's operator sets in them."""
    mesh = MESH if program.mesh is None else program.mesh
    config = submit.read_config(
        None, list({**SHORT, **mesh, "log.dir": str(program.output)}.items())
    )
    job = ranks_of(config.mesh, num_hosts=2, per_host=num_ranks // 2)
    options = KubernetesSettings(
        name="test", image="image", volumes={"claim": str(program.output.parent)}
    )
    config_map, manifest = kubernetes.manifests(config, job, options)
    (folder / "pods.yaml").write_text(config_map["data"]["config.yaml"])
    replicas = manifest["spec"]["pytorchReplicaSpecs"]

    def command(number: int, both: list[Host]) -> tuple[list[str], dict[str, str]]:
        (container,) = replicas["Master" if number == 0 else "Worker"]["template"]["spec"][
            "containers"
        ]
        operator = {
            "RANK": str(number),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": both[0].hostname,
            "MASTER_PORT": "23456",
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": manifest["spec"]["nprocPerNode"],
            "PET_NODE_RANK": str(number),
        }
        words = container["command"]
        for name, value in operator.items():
            words = [word.replace(f"$({name})", value) for word in words]
        words = [
            word.replace("/etc/threefold/config.yaml", str(folder / "pods.yaml"))
            for word in words
        ]
        if program.mesh is None:
            words = [*words[: words.index("-m")], *program.arguments()]
        own = {entry["name"]: entry["value"] for entry in container["env"]}
        return [str(BIN / words[0]), *words[1:]], {**operator, **own}

    return _on_hosts(folder, command)


def _open_mpi_on_hosts(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    """mpirun on the first host reaches the second one through a program of ours in the place of ssh."""
    agent = folder / "instead-of-ssh"
    with hosts("tfmpi", 2) as both:
        names = "\n".join(f"  {host.hostname}) namespace={host.namespace};;" for host in both)
        inside = 'unshare --uts --fork --kill-child sh -c \'hostname "$0"; exec sh -c "$*"\' "$host" "$@"'
        agent.write_text(
            f'#!/bin/sh\nhost=$1; shift\ncase "$host" in\n{names}\nesac\nexec ip netns exec "$namespace" {inside}\n'
        )
        agent.chmod(0o755)
        place = [
            "mpirun.openmpi",
            "--allow-run-as-root",
            "--oversubscribe",
            "--mca",
            "plm_rsh_agent",
            str(agent),
        ]
        slots = ",".join(f"{host.hostname}:{num_ranks // 2}" for host in both)
        place += ["--mca", "oob_tcp_if_include", "eth0", "--host", slots]
        place += [
            "-n",
            str(num_ranks),
            "-x",
            f"MASTER_ADDR={both[0].hostname}",
            "-x",
            "MASTER_PORT=29500",
        ]
        env = {**environment(folder), "OMP_NUM_THREADS": "1"}
        for name in ("OMP_NUM_THREADS", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
            place += ["-x", name]
        output = folder / "open-mpi.txt"
        process = both[0].start(
            [*place, PYTHON, *program.arguments()], cwd=folder, env=env, output=output
        )
        try:
            code = process.wait(_LONGEST_S)
        finally:
            process.kill()
            process.wait()
    return code, output.read_text()


def _no_open_mpi_on_hosts() -> str | None:
    return _needs("mpirun.openmpi", "openmpi-bin")() or why_no_hosts()


def srun(
    cluster: slurm.Cluster, folder: Path, program: Program, num_ranks: int
) -> tuple[int, str]:
    """On both nodes of a cluster that is there."""
    env = {**environment(folder), "OMP_NUM_THREADS": "1"}
    place = ["srun", "--nodes=2", f"--ntasks-per-node={num_ranks // 2}", "--oversubscribe"]
    done = cluster.run(*place, PYTHON, *program.arguments(), cwd=folder, env=env)
    return done.returncode, done.stdout + done.stderr


def _srun(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    with slurm.cluster(folder / "slurm") as cluster:
        return srun(cluster, folder, program, num_ranks)


def _sagemaker_on_hosts(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
    """The run's folder is shared, as an FSx channel is; everything else is each host's own."""

    def command(number: int, both: list[Host]) -> tuple[list[str], dict[str, str]]:
        base, names = (
            folder / f"{program.output.name}-ml-{number}",
            [host.hostname for host in both],
        )
        variables = _sagemaker_tree(base, names[number], names, "eth0", program, num_ranks)
        return sagemaker.toolkit_command(), {
            **sagemaker.toolkit_environment(folder, base),
            **variables,
        }

    return _on_hosts(folder, command)


def _no_toolkit_on_hosts() -> str | None:
    return sagemaker.why_not() or why_no_hosts()


SELF = Launch("threefold train", 1, _always, _self, None)
LAUNCHES = {
    "torchrun": Launch(
        "torchrun --nproc-per-node 4 -m threefold train", 1, _always, _torchrun, "torchrun"
    ),
    "torchrun, elastic": Launch(
        "torchrun --nnodes 1:1 --rdzv-backend c10d ... -m threefold train",
        1,
        _always,
        _torchrun_elastic,
        "torchrun",
    ),
    "accelerate": Launch(
        "accelerate launch --use_parallelism_config --parallelism_config_tp_size 2 ... -m threefold train",
        1,
        _no_accelerate,
        _accelerate,
        "torchrun",
        own_mesh=True,
    ),
    "Open MPI": Launch(
        "mpirun -n 4 python -m threefold train",
        1,
        _needs("mpirun.openmpi", "openmpi-bin"),
        _open_mpi,
        "open-mpi",
    ),
    "MPICH": Launch(
        "mpirun -n 4 python -m threefold train",
        1,
        _needs("mpirun.mpich", "mpich"),
        _mpich,
        "mpich",
    ),
    "SageMaker's toolkit": Launch(
        "threefold submit sagemaker", 1, sagemaker.why_not, _sagemaker, "torchrun"
    ),
    "torchrun on two hosts": Launch(
        "torchrun --nnodes 2 --node-rank I --master-addr HOST ... -m threefold train",
        2,
        why_no_hosts,
        _torchrun_on_hosts,
        "torchrun",
    ),
    "torchrun on two hosts, elastic": Launch(
        "torchrun --nnodes 2:2 --rdzv-endpoint HOST:29400 ... -m threefold train",
        2,
        why_no_hosts,
        _torchrun_elastic_on_hosts,
        "torchrun",
    ),
    "Open MPI on two hosts": Launch(
        "mpirun -n 4 --host A:2,B:2 -x MASTER_ADDR=A ... python -m threefold train",
        2,
        _no_open_mpi_on_hosts,
        _open_mpi_on_hosts,
        "open-mpi",
    ),
    "Slurm": Launch(
        "srun --nodes=2 --ntasks-per-node=2 python -m threefold train",
        2,
        slurm.why_not,
        _srun,
        "slurm",
    ),
    "SageMaker's toolkit on two hosts": Launch(
        "threefold submit sagemaker --nodes 2",
        2,
        _no_toolkit_on_hosts,
        _sagemaker_on_hosts,
        "torchrun",
    ),
    "PyTorchJob's variables": Launch(
        "threefold submit kubernetes --nodes 2 (its pods' command, without a cluster)",
        2,
        why_no_hosts,
        _pytorch_job,
        "torchrun",
    ),
}
