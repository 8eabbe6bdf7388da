"""`threefold doctor`: what it says of machines, networks, GPUs, packages and ranks that are not this one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from ranks.runs import command
from threefold.doctor import gpu, machine, nvidia, ranks
from threefold.doctor import network as checks_network
from threefold.doctor import packages as checks_packages
from threefold.doctor.findings import Finding, note, ok, stop, summary, warning, would_stop
from threefold.doctor.gpu import Gpu, Torch
from threefold.doctor.machine import Machine
from threefold.doctor.network import Interface, Network
from threefold.doctor.packages import Package
from threefold.doctor.ranks import RankReport
from threefold.mesh.topology import Topology

GIB = 1 << 30
MACHINE = Machine(
    "node-1", "Linux", "3.12.1", 8, 64 * GIB, 8 * GIB, 65536, {"runs (runs)": 500 * GIB}, True
)
LO, ETH, IB = (
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.5", speed=10000),
    Interface("ib0", "10.1.0.5"),
)
H100 = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0))
CUDA = Torch(
    "2.13.0+cu128",
    cuda=(12, 8),
    cudnn=(9, 10, 2),
    nccl=(2, 27, 5),
    architectures=("sm_80", "sm_90"),
    gpus=(H100, H100),
    driver="570.86",
    driver_cuda=(12, 8),
    installed_gpus=2,
)


def texts(findings: list[Finding], check: str) -> list[str]:
    return ["\n".join(finding.lines()) for finding in findings if finding.check == check]


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def test_machine_that_has_all_is_in_no_way() -> None:
    assert not [
        finding for finding in machine.judge(MACHINE) if finding.level in ("warning", "stop")
    ]


def test_machine_that_lacks_things() -> None:
    poor = dataclasses.replace(
        MACHINE,
        python="3.9.2",
        shared_memory=64 << 20,
        open_files=1024,
        disks={"runs (/data)": 300 << 20, "caches (/root)": 5 * GIB},
        clock_synchronized=False,
        tpu="/dev/accel*",
    )
    found = machine.judge(poor)
    assert texts(found, "Python") == [
        "STOP    Python: 3.9.2\n          expected: 3.11 or newer\n"
        "          fix: create a virtual environment with a newer Python"
    ]
    assert texts(found, "shared memory") == [
        "WARNING shared memory: 64 MiB free in /dev/shm\n"
        "          expected: 1 GiB: loader workers and NCCL pass data through it, and a process that finds it full "
        "dies with a bus error\n"
        "          fix: docker run --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir with medium: Memory at "
        "/dev/shm"
    ]
    assert texts(found, "open files") == [
        "WARNING open files: 1024 per process\n"
        "          expected: 4096: connections and the tensors of loader workers each take one\n"
        "          fix: docker run --ulimit nofile=65536, or a hard limit of nofile in /etc/security/limits.conf"
    ]
    assert texts(found, "disk") == [
        "STOP    disk: 300 MiB free for runs (/data)\n"
        "          expected: at least 1 GiB: nothing could be saved\n"
        "          fix: free some space, or use another folder: --log.dir for runs, HF_HOME and XDG_CACHE_HOME for "
        "caches",
        "WARNING disk: 5 GiB free for caches (/root)\n"
        "          expected: 20 GiB: a checkpoint with AdamW's state takes 12 bytes per parameter\n"
        "          fix: free some space, or use another folder: --log.dir for runs, HF_HOME and XDG_CACHE_HOME for "
        "caches",
    ]
    assert "not synchronised with a time server" in texts(found, "clock")[0]
    assert texts(found, "TPU") == [
        "WARNING TPU: this machine has a TPU (/dev/accel*)\n"
        "          expected: GPUs or CPUs: TPUs are not supported yet\n"
        "          fix: --mesh.device cpu to try things out, or a machine with GPUs"
    ]
    assert would_stop(found)


def test_tokens_are_found_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  password very-secret-key\n")
    environ = {"HOME": str(tmp_path), "HF_TOKEN": "hf_very_secret"}
    seen = machine.look(environ, folders={"runs": tmp_path / "not" / "there"})
    assert seen.tokens == {
        "Hugging Face": "set in HF_TOKEN",
        "Weights & Biases": f"in {tmp_path}/.netrc",
    }
    shown = "\n".join(
        line for each in machine.judge(seen) for line in each.lines()
    ) + json.dumps(dataclasses.asdict(seen))
    assert "secret" not in shown
    assert machine.look({"HOME": str(tmp_path / "x")}, folders={}).tokens == {}


def test_gloo_takes_what_the_hostname_stands_for() -> None:
    network = Network("node-1", (LO, ETH), "10.0.0.5")
    assert checks_network.gloo_interface(network) == (ETH, "node-1 resolves to 10.0.0.5")
    assert levels(checks_network.judge(network, several_machines=True))["gloo"] == "ok"


def test_gloo_on_the_loopback_is_a_fault_between_machines_only() -> None:
    network = Network("node-1", (LO, ETH), "127.0.1.1")
    alone = checks_network.judge(network, several_machines=False)
    assert levels(alone)["gloo"] == "warning"
    assert texts(checks_network.judge(network, several_machines=True), "gloo") == [
        "STOP    gloo: would offer 127.0.0.1 to the other machines: node-1 resolves to 127.0.1.1\n"
        "          expected: an address that they can reach\n"
        "          fix: GLOO_SOCKET_IFNAME=eth0, the one that the machines share, on all of them"
    ]


def test_interface_that_is_named_must_be_there() -> None:
    variables = {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "=eth9"}
    found = checks_network.judge(
        Network("node-1", (LO, ETH), "10.0.0.5", (), variables), several_machines=False
    )
    assert texts(found, "gloo") == [
        "STOP    gloo: GLOO_SOCKET_IFNAME=eth9, but this machine has no such interface\n"
        "          expected: one of lo, eth0\n"
        "          fix: GLOO_SOCKET_IFNAME=eth0, the one that the machines share, on all of them"
    ]
    assert texts(found, "NCCL") == [
        "STOP    NCCL: NCCL_SOCKET_IFNAME==eth9, but this machine has no such interface with an address\n"
        "          expected: one of lo, eth0\n"
        "          fix: NCCL_SOCKET_IFNAME=NAME, the one that the machines share, or unset it"
    ]


def test_interface_that_ranks_started_here_leave_is_said() -> None:
    variables = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    replaced = {"GLOO_SOCKET_IFNAME": "nope", "NCCL_SOCKET_IFNAME": "eth"}
    network = Network("node-1", (LO, ETH), "10.0.0.5", (), variables, replaced)
    found = {each.check: each for each in checks_network.judge(network, several_machines=False)}
    wrong, known = found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]
    assert wrong.level == "stop" and wrong.what.startswith(
        "this machine has no interface nope; ranks that are started"
    )
    assert (
        known.level == "note"
        and known.what == "eth is set; ranks that are started here use =lo in its place"
    )


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [(None, IB), ("eth", ETH), ("=eth0", ETH), ("^ib", LO), ("^lo,ib", ETH)],
)
def test_nccl_takes_infiniband_first_or_what_is_named(
    variable: str | None, chosen: Interface
) -> None:
    variables = {"NCCL_SOCKET_IFNAME": variable} if variable else {}
    network = Network(
        "node-1", (LO, Interface("docker0", "172.17.0.1"), ETH, IB), "10.0.0.5", (), variables
    )
    if variable is not None and variable.startswith("^lo"):
        network = dataclasses.replace(network, interfaces=(LO, ETH, IB))
    assert checks_network.nccl_interface(network)[0] == chosen


def test_this_machine_has_a_loopback() -> None:
    assert Interface("lo", "127.0.0.1").address in {
        each.address for each in checks_network.look({}).interfaces
    }


def test_gpus_that_fit() -> None:
    found = gpu.judge(CUDA)
    assert {finding.level for finding in found} == {"ok"}
    assert texts(found, "GPU 0") == [
        "ok      GPU 0: NVIDIA H100, 80 GiB, 79 GiB free, capability 9.0"
    ]


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        (
            {"cuda": (11, 7)},
            "CUDA",
            "STOP    CUDA: 11.7 in torch 2.13.0+cu128\n          expected: 11.8 or newer\n"
            "          fix: a newer build of torch, which includes it: pytorch.org/get-started",
        ),
        (
            {"cudnn": (8, 5, 0)},
            "cuDNN",
            "STOP    cuDNN: 8.5.0 in torch 2.13.0+cu128\n          expected: 8.6 or newer\n"
            "          fix: a newer build of torch, which includes it: pytorch.org/get-started",
        ),
        (
            {"nccl": None},
            "NCCL",
            "STOP    NCCL: torch 2.13.0+cu128 has none\n          expected: 2.14 or newer\n"
            "          fix: a newer build of torch, which includes it: pytorch.org/get-started",
        ),
        (
            {"driver": "470.86", "driver_cuda": (11, 4)},
            "driver",
            "STOP    driver: 470.86, supports CUDA up to 11.4; torch was built with 12.8\n"
            "          expected: a driver for CUDA 12\n"
            "          fix: a newer driver, or torch for CUDA 11: pytorch.org/get-started",
        ),
        (
            {"cuda": None},
            "CUDA",
            "STOP    CUDA: this machine has 2 GPUs, but torch 2.13.0+cu128 is a build for CPUs\n"
            "          expected: a build of torch for CUDA\n"
            "          fix: pip install torch from the index for your CUDA: pytorch.org/get-started; or --mesh.device "
            "cpu",
        ),
        (
            {"gpus": (), "visible": ""},
            "GPUs",
            "STOP    GPUs: 0 of 2 are visible: CUDA_VISIBLE_DEVICES=\n          expected: at least one\n"
            "          fix: unset CUDA_VISIBLE_DEVICES, or --mesh.device cpu",
        ),
        (
            {"gpus": (dataclasses.replace(H100, free=20 * GIB),)},
            "GPU 0",
            "WARNING GPU 0: NVIDIA H100, 80 GiB, 20 GiB free, capability 9.0\n"
            "          expected: a GPU for this run alone: other processes use its memory\n"
            "          fix: nvidia-smi lists them; CUDA_VISIBLE_DEVICES can leave this GPU out",
        ),
        (
            {"gpus": (dataclasses.replace(H100, capability=(12, 0)),)},
            "GPU 0",
            "STOP    GPU 0: NVIDIA H100, 80 GiB, 79 GiB free, capability 12.0; torch has code for sm_80, sm_90\n"
            "          expected: a build of torch for this generation of GPUs\n"
            "          fix: an older or newer build that matches the GPU: pytorch.org/get-started",
        ),
        (
            {"version": "2.4.0"},
            "torch",
            "STOP    torch: 2.4.0\n          expected: 2.11 or newer\n"
            "          fix: pip install -U torch, see pytorch.org/get-started",
        ),
        (
            {"version": None, "error": "libcudart.so.12: cannot open shared object file"},
            "torch",
            "STOP    torch: cannot be imported: libcudart.so.12: cannot open shared object file\n"
            "          expected: torch 2.11 or newer\n"
            "          fix: install it as described on pytorch.org/get-started",
        ),
    ],
)
def test_gpus_and_builds_that_do_not_fit(change: dict, check: str, text: str) -> None:
    assert texts(gpu.judge(dataclasses.replace(CUDA, **change)), check) == [text]


def test_capability_of_the_same_generation_fits() -> None:
    rtx = Gpu("NVIDIA RTX A6000", 48 * GIB, 48 * GIB, (8, 6))
    assert levels(gpu.judge(dataclasses.replace(CUDA, gpus=(rtx,))))["GPU 0"] == "ok"


def test_answers_of_nvidia_smi_are_read() -> None:
    header = "| NVIDIA-SMI 470.86       Driver Version: 470.86       CUDA Version: 11.4     |"
    assert gpu.read_summary(header) == ("470.86", (11, 4))
    assert gpu.read_summary("") == (None, None)
    matrix = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\nGPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\n"
        "GPU2\tSYS\tSYS\t X \tPIX\tSYS\t32-63\t1\nGPU3\tSYS\tSYS\tPIX\t X \tSYS\t32-63\t1\n"
        "NIC0\tPXB\tPXB\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
    )
    links = nvidia.read_links(matrix)
    assert links[(0, 1)] == "NV12" and links[(2, 3)] == "PIX" and len(links) == 6
    found = gpu.judge(dataclasses.replace(CUDA, links=links))
    assert texts(found, "links") == [
        "note    links: NVLink (NV12): 0-1; PCIe between CPUs: 0-2, 0-3, 1-2, 1-3; one PCIe switch: 2-3"
    ]


@pytest.mark.parametrize(
    ("number", "version"), [(8902, (8, 9, 2)), (90100, (9, 1, 0)), (91002, (9, 10, 2))]
)
def test_cudnn_numbers_are_read(number: int, version: tuple[int, ...]) -> None:
    assert gpu._cudnn_version(number) == version


def test_versions_that_do_not_fit() -> None:
    packages = {
        "threefold": Package(
            "threefold", "0.1.0", ("torch>=2.11", "transformers<6,>=5.20", "xxhash>=3.4")
        ),
        "torch": Package("torch", "2.13.0+cu128"),
        "transformers": Package("transformers", "4.57.1"),
        "torchvision": Package("torchvision", "0.20.1", ("numpy", "torch==2.5.1")),
    }
    assert [
        "\n".join(each.lines())
        for each in checks_packages.judge(packages, gpus=True)
        if each.fix
    ] == [
        "STOP    versions: transformers 4.57.1 is installed, but threefold needs transformers <6,>=5.20\n"
        "          expected: compatible versions: otherwise imports fail, or calls in the middle of a run\n"
        "          fix: pip install 'transformers<6,>=5.20'",
        "STOP    versions: xxhash is not installed\n          expected: xxhash >=3.4, which threefold needs\n"
        "          fix: pip install 'xxhash>=3.4'",
        "WARNING versions: torch 2.13.0+cu128 is installed, but torchvision needs torch ==2.5.1\n"
        "          expected: compatible versions: otherwise imports fail, or calls in the middle of a run\n"
        "          fix: pip install -U torchvision, or uninstall it if it is not used",
    ]


def test_this_environment_fits() -> None:
    assert not would_stop(checks_packages.judge(checks_packages.look(), gpus=False))


def report(rank: int, host: str, clock: float = 100.0, **versions: str) -> RankReport:
    return RankReport(
        rank,
        host,
        rank % 2,
        40 + rank,
        "cuda:0",
        clock,
        {"torch": "2.13.0", "driver": "1", **versions},
    )


def test_ranks_that_differ() -> None:
    reports = [
        report(0, "a"),
        report(1, "a"),
        report(2, "b", 103.5, torch="2.12.0"),
        report(3, "b", driver="2"),
    ]
    found = ranks.judge(reports, Topology(dp_replicate=2, tp=2))
    assert texts(found, "versions of the ranks") == [
        "WARNING versions of the ranks: driver: 1 on ranks 0 to 2; 2 on rank 3\n"
        "          expected: the same everywhere, so that all ranks compute and send the same\n"
        "          fix: the same environment or image on every machine",
        "STOP    versions of the ranks: torch: 2.13.0 on ranks 0, 1 and 3; 2.12.0 on rank 2\n"
        "          expected: the same everywhere, so that all ranks compute and send the same\n"
        "          fix: the same environment or image on every machine",
    ]
    assert texts(found, "clocks of the ranks") == [
        "WARNING clocks of the ranks: b (rank 2) is 3.5 s ahead of a (rank 0)\n"
        "          expected: within 1 s: logs of several machines are compared\n"
        "          fix: start chrony or systemd-timesyncd on both"
    ]


def test_axis_that_a_hosts_border_cuts_is_named() -> None:
    reports = [report(rank, "a" if rank < 2 else "b") for rank in range(4)]
    assert texts(ranks.judge(reports, Topology(tp=4)), "axis tp") == [
        "note    axis tp: ranks 0 to 3 are on several hosts: every layer waits for the network"
    ]
    assert texts(ranks.judge(reports, Topology(dp_replicate=2, tp=2)), "axis tp") == []


def test_rank_map() -> None:
    reports = [report(rank, "a" if rank < 2 else "b") for rank in range(4)]
    assert ranks.rank_map(reports, Topology(dp_replicate=2, tp=2))[3] == (
        "rank 3: dp 1  cp 0  tp 1  on b, cuda:0, process 43"
    )
    many = [report(rank, f"host-{rank // 8}") for rank in range(64)]
    assert (
        ranks.rank_map(many, Topology(dp_replicate=64))[-1]
        == "... and 48 more; 64 ranks on 8 hosts"
    )


def test_summary() -> None:
    fine, odd = [ok("a", "b"), note("c", "d")], warning("e", "f", "g", "h")
    assert summary(fine) == "2 checks: nothing would stop a run"
    assert summary([*fine, odd]) == "3 checks: 1 warning"
    assert (
        summary([*fine, odd, odd, stop("i", "j", "k", "l")])
        == "5 checks: 1 would stop a run, 2 warnings"
    )


def test_command_alone_looks_at_the_machine(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["stop"] is False
    assert {"Python", "machine", "gloo", "NCCL", "torch", "CUDA", "versions", "disk"} <= {
        finding["check"] for finding in values["findings"]
    }
    assert "ranks" not in values


def test_command_fails_where_something_would_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "nosuch0")
    done = command(tmp_path, "doctor")
    assert done.returncode == 1
    assert (
        "STOP    gloo: GLOO_SOCKET_IFNAME=nosuch0, but this machine has no such interface"
        in done.stdout
    )
    assert ": 1 would stop a run" in done.stdout.splitlines()[-1]
