"""One short run of the default model under every launcher that can be had here, each on the same mesh of four ranks.

The tests compare their losses with the run that the command launches itself; `docs/generate_launchers.py` makes a table
of them. Several hosts are network namespaces of this machine (`ranks.two_hosts`).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import sagemaker, slurm
from launchers.processes import free_port
from ranks.runs import environment
from ranks.two_hosts import Host, hosts
from ranks.two_hosts import why_not as why_no_hosts
from threefold.commands import submit
from threefold.jobs import kubernetes
from threefold.jobs import sagemaker as clusters_sagemaker
from threefold.jobs.job import ranks_of
from threefold.jobs.kubernetes import KubernetesOptions
from threefold.jobs.sagemaker import SageMakerOptions

PYTHON = sys.executable
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


@dataclass(frozen=True)
class Launch:
    """One way to start it.

    Attributes:
        shown: the command, as a reader would type it.
        hosts: machines that it runs on.
        why_not: why it cannot be started here, or None.
        start: runs it in a folder to its end, into the run's folder; returns exit code and what was printed.
    """

    shown: str
    hosts: int
    why_not: Callable[[], str | None]
    start: Callable[[Path, Path], tuple[int, str]]


def train(run: Path, *, mesh: Mapping[str, str] = MESH) -> list[str]:
    """The arguments behind `-m`."""
    keys = {**SHORT, **mesh, "log.dir": str(run)}
    return ["threefold", "train", *(part for key, value in keys.items() for part in (f"--{key}", value))]


def _run(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
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


def _self(folder: Path, run: Path) -> tuple[int, str]:
    return _run([PYTHON, "-m", *train(run)], folder)


def _torchrun(folder: Path, run: Path) -> tuple[int, str]:
    place = ["--nproc-per-node", "4", "--master-port", str(free_port())]
    return _run([str(BIN / "torchrun"), *place, "-m", *train(run)], folder)


def _torchrun_elastic(folder: Path, run: Path) -> tuple[int, str]:
    place = ["--nnodes", "1:1", "--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return _run([str(BIN / "torchrun"), *place, "-m", *train(run)], folder)


def _no_accelerate() -> str | None:
    return None if (BIN / "accelerate").exists() else "no accelerate here (pip install accelerate)"


def _accelerate(folder: Path, run: Path) -> tuple[int, str]:
    """Its own sizes are the mesh: no mesh key is given."""
    sizes = {"dp_replicate": "2", "dp_shard": "1", "tp": "2", "cp": "1"}
    place = ["--num_processes", "4", "--main_process_port", str(free_port()), "--mixed_precision", "no"]
    place += ["--num_machines", "1", "--dynamo_backend", "no", "--use_fsdp", "--fsdp_version", "2"]
    place.append("--use_parallelism_config")
    place += [part for axis, size in sizes.items() for part in (f"--parallelism_config_{axis}_size", size)]
    return _run([str(BIN / "accelerate"), "launch", *place, "-m", *train(run, mesh={})], folder)


def _open_mpi(folder: Path, run: Path) -> tuple[int, str]:
    place = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    return _run([*place, PYTHON, "-m", *train(run)], folder)


def _mpich(folder: Path, run: Path) -> tuple[int, str]:
    return _run(["mpirun.mpich", "-n", "4", PYTHON, "-m", *train(run)], folder, {"MASTER_PORT": str(free_port())})


def _sagemaker_job(run: Path, num_hosts: int) -> tuple[dict, bytes]:
    keys = {**SHORT, **MESH, **({"log.dir": str(run)} if num_hosts > 1 else {})}
    config = submit.read_config(None, list(keys.items()))
    job = ranks_of(config.mesh, num_hosts=num_hosts, per_host=4 // num_hosts)
    options = SageMakerOptions(
        name="test", image="image", role="role", instance_type=sagemaker.INSTANCE, output="s3://bucket/prefix"
    )
    return clusters_sagemaker.request(job, options, region="us-east-1"), clusters_sagemaker.archive(config, options)


def _sagemaker_tree(base: Path, host: str, all_hosts: list[str], num_ranks: int, interface: str, run: Path) -> None:
    request, source = _sagemaker_job(run, len(all_hosts))
    sagemaker.lay_out(
        base,
        request=request,
        source=source,
        host=host,
        hosts=all_hosts,
        num_ranks=num_ranks,
        interface=interface,
        channels={},
    )


def _sagemaker(folder: Path, run: Path) -> tuple[int, str]:
    base = folder / "ml-alone"
    _sagemaker_tree(base, socket.gethostname(), [socket.gethostname()], 4, "lo", run)
    ended = _run(sagemaker.toolkit_command(), folder, sagemaker.toolkit_environment(folder, base))
    run.symlink_to(base / "checkpoints")
    return ended


# --- two hosts ----------------------------------------------------------------------------------------------------


def _torchrun_on_hosts(folder: Path, run: Path) -> tuple[int, str]:
    def command(number: int, both: list[Host]) -> tuple[list[str], dict[str, str]]:
        place = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)]
        place += ["--master-addr", both[0].hostname, "--master-port", "29500"]
        return [str(BIN / "torchrun"), *place, "-m", *train(run)], {}

    return _on_hosts(folder, command)


def _torchrun_elastic_on_hosts(folder: Path, run: Path) -> tuple[int, str]:
    def command(number: int, both: list[Host]) -> tuple[list[str], dict[str, str]]:
        place = ["--nnodes", "2:2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        place += ["--rdzv-endpoint", f"{both[0].hostname}:29400", "--local-addr", both[number].address]
        place += ["--rdzv-conf", f"is_host={'true' if number == 0 else 'false'}"]
        return [str(BIN / "torchrun"), *place, "-m", *train(run)], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    return _on_hosts(folder, command)


def _pytorch_job(folder: Path, run: Path) -> tuple[int, str]:
    """The pods of our own manifest, with the variables that Kubeflow's operator sets in them."""
    config = submit.read_config(None, list({**SHORT, **MESH, "log.dir": str(run)}.items()))
    job = ranks_of(config.mesh, num_hosts=2, per_host=2)
    options = KubernetesOptions(name="test", image="image", volumes={"claim": str(run.parent)})
    config_map, manifest = kubernetes.manifests(config, job, options)
    (folder / "pods.yaml").write_text(config_map["data"]["config.yaml"])
    replicas = manifest["spec"]["pytorchReplicaSpecs"]

    def command(number: int, both: list[Host]) -> tuple[list[str], dict[str, str]]:
        (container,) = replicas["Master" if number == 0 else "Worker"]["template"]["spec"]["containers"]
        operator = {
            "RANK": str(number),
            "WORLD_SIZE": "4",
            "MASTER_ADDR": both[0].hostname,
            "MASTER_PORT": "23456",
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": manifest["spec"]["nprocPerNode"],
            "PET_NODE_RANK": str(number),
        }
        words = container["command"]
        for name, value in operator.items():
            words = [word.replace(f"$({name})", value) for word in words]
        words = [word.replace("/etc/threefold/config.yaml", str(folder / "pods.yaml")) for word in words]
        own = {entry["name"]: entry["value"] for entry in container["env"]}
        return [str(BIN / words[0]), *words[1:]], {**operator, **own}

    return _on_hosts(folder, command)


def _open_mpi_on_hosts(folder: Path, run: Path) -> tuple[int, str]:
    """mpirun on the first host reaches the second one through a program of ours in the place of ssh."""
    agent = folder / "instead-of-ssh"
    with hosts("tfmpi", 2) as both:
        names = "\n".join(f"  {host.hostname}) namespace={host.namespace};;" for host in both)
        inside = 'unshare --uts --fork --kill-child sh -c \'hostname "$0"; exec sh -c "$*"\' "$host" "$@"'
        agent.write_text(
            f'#!/bin/sh\nhost=$1; shift\ncase "$host" in\n{names}\nesac\nexec ip netns exec "$namespace" {inside}\n'
        )
        agent.chmod(0o755)
        place = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", str(agent)]
        place += ["--mca", "oob_tcp_if_include", "eth0", "--host", ",".join(f"{host.hostname}:2" for host in both)]
        place += ["-n", "4", "-x", f"MASTER_ADDR={both[0].hostname}", "-x", "MASTER_PORT=29500"]
        env = {**environment(folder), "OMP_NUM_THREADS": "1"}
        for name in ("OMP_NUM_THREADS", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
            place += ["-x", name]
        output = folder / "open-mpi.txt"
        process = both[0].start([*place, PYTHON, "-m", *train(run)], cwd=folder, env=env, output=output)
        try:
            code = process.wait(_LONGEST_S)
        finally:
            process.kill()
            process.wait()
    return code, output.read_text()


def _no_open_mpi_on_hosts() -> str | None:
    return _needs("mpirun.openmpi", "openmpi-bin")() or why_no_hosts()


def _srun(folder: Path, run: Path) -> tuple[int, str]:
    with slurm.cluster(folder / "slurm") as cluster:
        env = {**environment(folder), "OMP_NUM_THREADS": "1"}
        place = ["srun", "--nodes=2", "--ntasks-per-node=2", "--oversubscribe"]
        done = cluster.run(*place, PYTHON, "-m", *train(run), cwd=folder, env=env)
        return done.returncode, done.stdout + done.stderr


def _sagemaker_on_hosts(folder: Path, run: Path) -> tuple[int, str]:
    """The run's folder is shared, as an FSx channel is; everything else is each host's own."""

    def command(number: int, both: list[Host]) -> tuple[list[str], dict[str, str]]:
        base, names = folder / f"ml-{number}", [host.hostname for host in both]
        _sagemaker_tree(base, names[number], names, 2, "eth0", run)
        return sagemaker.toolkit_command(), sagemaker.toolkit_environment(folder, base)

    return _on_hosts(folder, command)


def _no_toolkit_on_hosts() -> str | None:
    return sagemaker.why_not() or why_no_hosts()


SELF = Launch("threefold train", 1, _always, _self)
LAUNCHES = {
    "torchrun": Launch("torchrun --nproc-per-node 4 -m threefold train", 1, _always, _torchrun),
    "torchrun, elastic": Launch(
        "torchrun --nnodes 1:1 --rdzv-backend c10d ... -m threefold train", 1, _always, _torchrun_elastic
    ),
    "accelerate": Launch(
        "accelerate launch --use_parallelism_config --parallelism_config_tp_size 2 ... -m threefold train",
        1,
        _no_accelerate,
        _accelerate,
    ),
    "Open MPI": Launch("mpirun -n 4 python -m threefold train", 1, _needs("mpirun.openmpi", "openmpi-bin"), _open_mpi),
    "MPICH": Launch("mpirun -n 4 python -m threefold train", 1, _needs("mpirun.mpich", "mpich"), _mpich),
    "SageMaker's toolkit": Launch("threefold submit sagemaker", 1, sagemaker.why_not, _sagemaker),
    "torchrun on two hosts": Launch(
        "torchrun --nnodes 2 --node-rank I --master-addr HOST ... -m threefold train",
        2,
        why_no_hosts,
        _torchrun_on_hosts,
    ),
    "torchrun on two hosts, elastic": Launch(
        "torchrun --nnodes 2:2 --rdzv-endpoint HOST:29400 ... -m threefold train",
        2,
        why_no_hosts,
        _torchrun_elastic_on_hosts,
    ),
    "Open MPI on two hosts": Launch(
        "mpirun -n 4 --host A:2,B:2 -x MASTER_ADDR=A ... python -m threefold train",
        2,
        _no_open_mpi_on_hosts,
        _open_mpi_on_hosts,
    ),
    "Slurm": Launch("srun --nodes=2 --ntasks-per-node=2 python -m threefold train", 2, slurm.why_not, _srun),
    "SageMaker's toolkit on two hosts": Launch(
        "threefold submit sagemaker --instances 2", 2, _no_toolkit_on_hosts, _sagemaker_on_hosts
    ),
    "PyTorchJob's variables": Launch(
        "threefold submit kubernetes --nodes 2 (its pods' command, without a cluster)", 2, why_no_hosts, _pytorch_job
    ),
}
