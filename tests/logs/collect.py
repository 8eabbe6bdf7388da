"""Makes the logs in produced/ anew: `python tests/logs/collect.py [NAME ...]`; root and two cores, about four minutes.

Each log is what a program of failing.py, started as below, has written to stdout and stderr. Only places, hosts, ports,
process numbers and times are replaced. What is to be found in each is said in cases.py.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PRODUCED = HERE / "produced"
RUN = "{torchrun} --nproc-per-node 2 {failing} {name}"
PLAIN = "{python} {failing} {name}"
# A memory limit of the kernel's own, which then kills.
LIMITED = (
    "mkdir -p /sys/fs/cgroup/memory/{name} && echo 1500M > /sys/fs/cgroup/memory/{name}/memory.limit_in_bytes && "
    "echo $$ > /sys/fs/cgroup/memory/{name}/cgroup.procs && exec " + RUN
)
TMPFS = "mount -t tmpfs -o size={size} tmpfs {at} && cd {at} && exec "
# Two hosts as network namespaces with a cable between them; the first gives an address that only it can reach.
HOSTS = """
for i in 1 2; do ip netns add log$i; done
ip link add eth0 netns log1 type veth peer name eth0 netns log2
for i in 1 2; do ip -n log$i addr add 192.168.77.$i/24 dev eth0; ip -n log$i link set eth0 up
ip -n log$i link set lo up; done
export MASTER_ADDR=192.168.77.1 MASTER_PORT=29500 WORLD_SIZE=2
RANK=0 GLOO_SOCKET_IFNAME=lo ip netns exec log1 {python} {failing} joins > /dev/null 2>&1 &
RANK=1 GLOO_SOCKET_IFNAME=eth0 ip netns exec log2 {python} {failing} joins; code=$?
wait; for i in 1 2; do ip netns del log$i; done; exit $code
"""


@dataclass(frozen=True)
class Start:
    """How a log is made: a shell command, and what is set for it; `unshared`: with mounts of its own."""

    command: str = RUN
    environ: dict[str, str] = field(default_factory=dict)
    program: str | None = None
    unshared: bool = False


STARTS: dict[str, Start] = {
    "gloo-connect": Start(HOSTS),
    "gloo-interface": Start(environ={"GLOO_SOCKET_IFNAME": "eth9"}, program="joins"),
    "gloo-timeout": Start(),
    "peer-gone": Start(),
    "uneven-epoch": Start(),
    "join-exhausted": Start(),
    "no-server": Start(
        PLAIN,
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"},
        "waits-for-server",
    ),
    "nobody-joins": Start(
        PLAIN,
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"},
        "waits-for-server",
    ),
    "unknown-host": Start(
        PLAIN,
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "node-1.invalid",
            "MASTER_PORT": "29500",
        },
        "waits-for-server",
    ),
    "rendezvous-timeout": Start(
        "{torchrun} --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:{port} "
        "--rdzv-conf join_timeout=4 {failing} joins"
    ),
    "rendezvous-refused": Start(
        "{torchrun} --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} "
        "--rdzv-conf is_host=0,read_timeout=3 {failing} joins"
    ),
    "occupied-port": Start(PLAIN),
    "occupied-port-torchrun": Start(
        "{python} -m http.server {port} > /dev/null 2>&1 & sleep 1; "
        "{torchrun} --nproc-per-node 2 --master-port {port} {failing} joins; code=$?; kill %1; exit $code"
    ),
    "no-variables": Start(PLAIN),
    "half-of-variables": Start(PLAIN, {"RANK": "0", "WORLD_SIZE": "2"}),
    "not-initialized": Start(PLAIN),
    "initialized-twice": Start(),
    "backend-of-one-device": Start(),
    "collective-mismatch": Start(environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    "shape-mismatch": Start(environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    "monitored-barrier": Start(),
    "world-size-assertion": Start(),
    "mesh-too-big": Start(),
    "threefold-mesh": Start(
        "{torchrun} --nproc-per-node 2 -m threefold train --mesh.tp 3 --log.dir run"
    ),
    "threefold-batch": Start(
        "{torchrun} --nproc-per-node 2 -m threefold train --train.global_batch 15 --log.dir run"
    ),
    "mixed-dtensor": Start(),
    "clip-over-meshes": Start(),
    "unused-parameters": Start(),
    "other-model": Start(),
    "ready-twice": Start(),
    "in-place": Start(),
    "frozen": Start(),
    "module-prefix": Start(),
    "other-sizes": Start(PLAIN),
    "dtype-mismatch": Start(PLAIN),
    "index-out-of-range": Start(PLAIN),
    "cpu-memory": Start(PLAIN),
    "killed-by-memory": Start(LIMITED),
    "killed-in-spawn": Start(PLAIN),
    "shared-memory": Start(TMPFS.format(size="8m", at="/dev/shm") + PLAIN, unshared=True),
    "killed-worker": Start(PLAIN),
    "open-files": Start("ulimit -n 64; exec " + PLAIN),
    "full-disk": Start(
        "mkdir full; " + TMPFS.format(size="1m", at="full") + PLAIN, unshared=True
    ),
    "segmentation-fault": Start(),
    "silent-exit": Start(),
    "own-error": Start(),
    "stopped": Start("timeout --signal TERM 12 " + RUN),
    "unguarded-spawn": Start(PLAIN),
    "no-compiler": Start(PLAIN, {"CXX": "no-such-compiler"}),
    "no-cuda": Start(PLAIN),
    "no-flash-attention": Start(PLAIN),
    "hub-offline": Start(PLAIN, {"HF_HUB_OFFLINE": "1"}),
    "hub-gated": Start(PLAIN),
    "hub-not-found": Start(PLAIN),
    "hub-forbidden": Start(PLAIN),
    "hub-rate-limit": Start(PLAIN),
    "unknown-architecture": Start(PLAIN),
    "pointer-instead-of-weights": Start(PLAIN),
}


def make(name: str) -> str:
    """What the program `name` writes before it ends."""
    start, bin_ = STARTS[name], Path(sys.executable).parent
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="log-") as folder:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        places = {
            "python": sys.executable,
            "torchrun": str(bin_ / "torchrun"),
            "failing": str(HERE / "failing.py"),
            "name": start.program or name,
            "port": port,
        }
        command = re.sub(
            r"\{(\w+)\}", lambda found: places.get(found[1], found[0]), start.command
        )
        environ = {key: value.replace("{port}", port) for key, value in start.environ.items()}
        base = {
            "PATH": os.environ["PATH"],
            "HF_HOME": f"{folder}/hub",
            "TMPDIR": folder,
            "HOME": folder,
        }
        done = subprocess.run(
            [*(["unshare", "--mount"] if start.unshared else []), "bash", "-c", command],
            cwd=folder,
            env={**base, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=120,
        )
        if (limited := Path("/sys/fs/cgroup/memory", name)).is_dir():
            limited.rmdir()
        return scrub(done.stdout, folder, port)


def scrub(text: str, folder: str, port: str) -> str:
    """The log without what belongs to one machine and one minute."""
    prefix = Path(sys.prefix)
    replaced = [
        (re.escape(str(HERE / "failing.py")), "train.py"),
        (re.escape(str(prefix)), "/venv"),
        (re.escape(str(Path(sys.base_prefix))), "/usr"),
        (re.escape(str(HERE.parents[1])), "/project"),
        (re.escape(folder), "/job"),
        (re.escape(socket.gethostname()), "node-1"),
        (rf"\b{port}\b", "29500"),
        (
            r"(?<=localhost:)\d{4,5}|(?<=\[192\.168\.77\.\d\]:)\d{4,5}|(?<=\[127\.0\.0\.1\]:)\d{4,5}|(?<=\[localhost\]:)\d{4,5}",
            "45678",
        ),
        (r"\d{4}-\d{2}-\d{2}([ _T])\d{2}:\d{2}:\d{2}(\.\d+)?", r"2026-01-01\g<1>10:00:00"),
        (r"\b([EWI])\d{4} \d{2}:\d{2}:\d{2}\.\d+ \d+", r"\g<1>0101 10:00:00.000000 4242"),
        (r"\[([EWI])\d{3,4} \d{2}:\d{2}:\d{2}\.\d+ ", r"[\g<1>101 10:00:00.000000000 "),
        (
            r"(?i)(\bpid:? |pid\(s\) |PID |local_rank: \d\) of binary: |process )\d{2,}",
            r"\g<1>4243",
        ),
        (r"0x[0-9a-f]{6,}", "0x7f0000000000"),
        (r"(model-|torchelastic_|none_|tmp)[a-z0-9_]{8}\b", r"\g<1>abcdefgh"),
        (r"[ \t]+$", ""),
    ]
    for pattern, by in replaced:
        text = re.sub(pattern, by, text, flags=re.MULTILINE)
    return re.sub(
        r"(frame #\d+: .*\n){4,}", "frame #0: ... (frames of libtorch left out)\n", text
    )


def main() -> None:
    names = sys.argv[1:] or list(STARTS)
    PRODUCED.mkdir(exist_ok=True)
    for name in names:
        text = make(name)
        (PRODUCED / f"{name}.log").write_text(text)
        last = next((line for line in reversed(text.splitlines()) if "rror" in line), "?")
        print(f"{name}: {len(text.splitlines())} lines; {last[:110]}", flush=True)
    shutil.rmtree(HERE / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    main()
