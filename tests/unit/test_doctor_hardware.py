"""`threefold doctor` on machines whose GPUs or cards are sick: what their tools print, in the forms that they have."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from ranks.runs import command
from threefold.config.loading import validate
from threefold.doctor import gpu, network, nvidia, ranks, rdma
from threefold.doctor.findings import Finding
from threefold.doctor.nvidia import Answer, Nvidia
from unit.test_doctor import CUDA, H100

MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.90\n"
)
LISTED = "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n}f00)\n" for n in range(8))
LOST = {
    "Unable to determine the device handle for GPU3: 0000:5F:00.0: Unknown Error\n": "0000:5F:00.0",
    "Unable to determine the device handle for GPU0000:25:00.0: Unknown Error\n": "0000:25:00.0",
    "Unable to determine the device handle for gpu 0000:3B:00.0: GPU is lost.  Reboot the system\n": "0000:3B:00.0",
    "Unable to determine the device handle for GPU2: Unknown Error\n": "GPU2",
}
# As `nvidia-smi -q -x` prints it, without what nobody looks at.
GPU = """\
  <gpu id="00000000:18:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <gpu_recovery_action>None</gpu_recovery_action>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
      <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
      <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage><total>81559 MiB</total><used>1 MiB</used></fb_memory_usage>
    <ecc_errors>
      <volatile>
        <sram_correctable>3</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>9</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate>
    </ecc_errors>
    <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr>
      <remapped_row_unc>2</remapped_row_unc>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <fabric><state>Completed</state><status>Success</status></fabric>
  </gpu>
"""
XIDS = """\
[   12.1] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  550.90.07
[ 9921.3] NVRM: Xid (PCI:0000:5f:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 9921.4] NVRM: Xid (PCI:0000:5f:00): 79, pid=12, name=python, GPU has fallen off the bus.
[10001.0] NVRM: Xid (PCI:0000:18:00): 31, pid=77, name=python, Ch 00000008, intr 00000000. MMU Fault
[10002.0] NVRM: Xid (PCI:0000:18:00): 13, pid=77, name=python, Graphics SM Warp Exception
"""


def report(*gpus: str) -> str:
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
    return (
        f"{head}<driver_version>550.90.07</driver_version>\n{''.join(gpus)}</nvidia_smi_log>\n"
    )


def said(findings: list[Finding]) -> list[str]:
    return [f"{each.level} {each.check}: {each.what}" for each in findings]


def sick(old: str, new: str) -> Nvidia:
    assert GPU.count(old) == 1, old
    return Nvidia(
        Answer("", 0), Answer(LISTED, 0), nvidia.read_health(report(GPU, GPU.replace(old, new)))
    )


def test_healthy_gpus_are_found_so() -> None:
    gpus = nvidia.read_health(report(GPU, GPU))
    assert [(each.name, each.bus, each.memory, each.uncorrected) for each in gpus] == [
        ("NVIDIA H100 80GB HBM3", "00000000:18:00.0", "81559 MiB", 0)
    ] * 2
    seen = Nvidia(Answer("", 0), Answer(LISTED, 0), gpus, links={(0, 1): "NV18"})
    assert nvidia.judge(seen) == [] and seen.installed == 8
    assert nvidia.judge(Nvidia()) == []  # a machine without nvidia-smi
    for broken in ("", "no xml", "<nvidia_smi_log><gpu>", LISTED):
        assert nvidia.read_health(broken) == []


@pytest.mark.parametrize(
    ("old", "new", "found", "remedy"),
    [
        (
            *("<dram_uncorrectable>0<", "<dram_uncorrectable>2<"),
            "stop GPU 1 memory: NVIDIA H100 80GB HBM3 at 00000000:18:00.0: 2 uncorrectable ECC errors since the driver "
            "was loaded",
            "nvidia-smi -r -i 1",
        ),
        (
            *("<remapped_row_failure>No<", "<remapped_row_failure>Yes<"),
            "stop GPU 1 memory: NVIDIA H100 80GB HBM3 at 00000000:18:00.0: a failed row could not be replaced",
            "drain it",
        ),
        (
            *("<remapped_row_pending>No<", "<remapped_row_pending>Yes<"),
            "warning GPU 1 memory: NVIDIA H100 80GB HBM3 at 00000000:18:00.0: failed rows wait to be replaced",
            "sudo nvidia-smi -r -i 1",
        ),
        (
            *("<pending_retirement>N/A<", "<pending_retirement>Yes<"),
            "warning GPU 1 memory: NVIDIA H100 80GB HBM3 at 00000000:18:00.0: failed rows wait to be replaced",
            "sudo nvidia-smi -r -i 1",
        ),
        (
            *("<gpu_recovery_action>None<", "<gpu_recovery_action>GPU Reset<"),
            "stop GPU 1: NVIDIA H100 80GB HBM3 at 00000000:18:00.0: its driver asks for 'GPU Reset'",
            "nvidia-smi -r -i 1",
        ),
        (
            *(
                "<state>Completed</state><status>Success<",
                "<state>In Progress</state><status>N/A<",
            ),
            "stop fabric: NVIDIA H100 80GB HBM3 at 00000000:18:00.0: its fabric is not ready (In Progress, N/A)",
            "nvidia-fabricmanager",
        ),
        (
            *("hw_thermal_slowdown>Not Active<", "hw_thermal_slowdown>Active<"),
            "warning GPU 1 clocks: NVIDIA H100 80GB HBM3 at 00000000:18:00.0 is slowed: it is too hot",
            "fans",
        ),
        (
            *("<total>81559 MiB<", "<total>40960 MiB<"),
            "warning GPUs: are not equal: 1 x NVIDIA H100 80GB HBM3 (81559 MiB); 1 x NVIDIA H100 80GB HBM3 (40960 MiB)",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            *("<current_mig>Disabled<", "<current_mig>Enabled<"),
            "note GPU 1 MIG: on: a rank gets one part of this GPU, and NCCL cannot connect two parts of one",
            "",
        ),
    ],
)
def test_gpu_that_is_sick_is_named(old: str, new: str, found: str, remedy: str) -> None:
    (finding,) = nvidia.judge(sick(old, new))
    assert said([finding]) == [found] and remedy in finding.fix


def test_driver_that_does_not_answer_stops_a_run() -> None:
    def only(seen: Nvidia) -> Finding:
        (finding,) = nvidia.judge(seen)
        # It is told once, and not as a driver that is missing.
        tools = dataclasses.replace(
            CUDA, driver=None, driver_cuda=None, installed_gpus=None, gpus=(), silent=True
        )
        assert not [each for each in gpu.judge(tools) if each.check == "driver"]
        return finding

    mismatch = only(Nvidia(Answer(MISMATCH, 18)))
    assert (
        mismatch.level == "stop"
        and "modprobe nvidia" in mismatch.fix
        and "mismatch" in mismatch.what
    )
    failed = only(
        Nvidia(
            Answer(
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
                9,
            )
        )
    )
    assert failed.level == "stop" and "couldn't communicate" in failed.what
    late = only(Nvidia(Answer(late=True)))
    assert said([late]) == ["stop driver: nvidia-smi gave no answer in 10 s"]


def test_gpus_that_are_lost() -> None:
    for text, bus in LOST.items():
        seen = Nvidia(Answer("", 0), Answer(text + LISTED.partition("GPU 7")[0], 0))
        assert seen.installed == 8
        (finding,) = nvidia.judge(seen)
        assert said([finding]) == [f"stop GPUs: nvidia-smi cannot talk to the GPU at {bus}"]


def test_xids_that_no_application_causes() -> None:
    assert nvidia.read_xids(XIDS) == {("0000:5f:00", 79): 2}
    (finding,) = nvidia.judge(
        Nvidia(Answer("", 0), Answer(LISTED, 0), xids=nvidia.read_xids(XIDS))
    )
    assert said([finding]) == [
        "stop Xid: Xid 79 at PCI 0000:5f:00: the GPU has fallen off the bus, 2 times"
    ]


def test_links_that_err_or_are_unequal() -> None:
    errors = "GPU 0: NVIDIA H100 (UUID: GPU-0)\n\t Link 0: Replay Errors: 0\n\t Link 0: Recovery Errors: 0\n"
    errors += "GPU 1: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: Replay Errors: 7\n\t Link 3: Recovery Errors: 2\n"
    assert nvidia.read_link_errors(errors) == {1: 9}
    states = "GPU 0: H100\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\nGPU 1: H100\n\t Link 0: 26.562 GB/s\n"
    states += "\t Link 1: <inactive>\nGPU 2: A10\n\t Link 0: <inactive>\n"
    assert nvidia.read_inactive_links(states) == {1: 1}
    links = {(0, 1): "NV18", (0, 2): "NV18", (1, 2): "SYS"}
    seen = Nvidia(
        Answer("", 0), Answer(LISTED, 0), link_errors={1: 9}, inactive_links={1: 1}, links=links
    )
    assert said(nvidia.judge(seen)) == [
        "warning NVLink: GPU 1: 9 replayed or recovered transfers since the driver was loaded",
        "warning NVLink: GPU 1: 1 links are inactive",
        "warning links: GPUs 1-2 connect over PCIe, the others over NVLink",
    ]
    assert (
        nvidia.judge(
            Nvidia(
                Answer("", 0),
                Answer(LISTED, 0),
                links={(0, 1): "NV4", (0, 2): "SYS", (1, 2): "SYS"},
            )
        )
        == []
    )


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        (
            {"installed_gpus": 8, "gpus": (H100,) * 7},
            "torch has 7 GPUs, though CUDA_VISIBLE_DEVICES is not set",
            "dmesg",
        ),
        (
            {"installed_gpus": 8, "gpus": (H100,), "visible": "0,9"},
            "torch has 1 GPUs, of CUDA_VISIBLE_DEVICES=0,9",
            "numbers from 0",
        ),
        (
            {
                "installed_gpus": 8,
                "gpus": (),
                "trouble": "CUDA initialization: Error 802: system not yet initialized",
            },
            "CUDA waits for the fabric of the NVSwitches (error 802)",
            "nvidia-fabricmanager",
        ),
        (
            {"gpus": (), "trouble": "CUDA initialization: CUDA unknown error"},
            "CUDA initialization: CUDA unknown error",
            "dmesg",
        ),
    ],
)
def test_gpus_that_torch_lacks(change: dict, what: str, remedy: str) -> None:
    found = [
        each for each in gpu.judge(dataclasses.replace(CUDA, **change)) if each.level == "stop"
    ]
    assert (
        [each.what for each in found] == [what]
        and remedy in found[0].fix
        and "unset" not in found[0].fix
    )


def test_gpus_that_were_left_out_on_purpose_are_no_fault() -> None:
    seen = dataclasses.replace(CUDA, installed_gpus=8, gpus=(H100, H100), visible="0,1")
    assert not [each for each in gpu.judge(seen) if each.level in ("warning", "stop")]
    rocm = dataclasses.replace(
        CUDA, cuda=None, nccl=None, cudnn=None, rocm="6.4", installed_gpus=None, driver=None
    )
    assert [each.check for each in gpu.judge(rocm) if each.level == "warning"] == ["ROCm"]


def test_cards_that_nccl_cannot_use(tmp_path: Path) -> None:
    assert rdma.judge(rdma.look({}, root=tmp_path), gpus=True) == []
    for name, driver in (("mlx5_0", "mlx5_core"), ("rdmap0s6", "efa")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "sys/class/infiniband" / name / "device").mkdir(parents=True)
        (tmp_path / "sys/class/infiniband" / name / "device/driver").symlink_to(
            tmp_path / "drivers" / driver
        )
    seen = rdma.look({}, root=tmp_path)
    assert seen.devices == [("mlx5_0", "mlx5_core"), ("rdmap0s6", "efa")] and not seen.direct
    seen = dataclasses.replace(seen, locked_memory=64 << 10)
    assert [each.check for each in rdma.judge(seen, gpus=True)] == ["locked memory", "EFA"]
    assert rdma.judge(seen, gpus=False) == []
    plugin = tmp_path / "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/modules").write_text("nvidia 1 0 - Live\nnvidia_peermem 2 0 - Live\n")
    assert (
        rdma.look({}, root=tmp_path).plugin == str(plugin)
        and rdma.look({}, root=tmp_path).direct
    )
    mellanox = rdma.Rdma([("mlx5_0", "mlx5_core")], None, direct=False)
    assert said(rdma.judge(mellanox, gpus=True)) == [
        "warning GPUDirect: mlx5_0 cannot reach the GPUs' memory: nvidia_peermem is not loaded"
    ]


def test_port_that_is_down_beside_others() -> None:
    up, down = (
        "mlx5_0 port 1: 4: ACTIVE, 400 Gb/sec, InfiniBand",
        "mlx5_1 port 1: 1: DOWN, 10 Gb/sec, InfiniBand",
    )
    unused = "mlx5_2 port 1: 1: DOWN, 40 Gb/sec, Ethernet"
    for ports, levels in (
        ((up, down, unused), ["note", "warning", "note"]),
        ((down, unused), ["note", "note"]),
    ):
        seen = network.Network("h", infiniband=ports)
        found = [
            each.level
            for each in network.judge(seen, several_machines=False)
            if each.check == "InfiniBand"
        ]
        assert found == levels


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose nvidia-smi waits for a driver that does not answer."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho half a line\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(nvidia, "LIMIT_S", 0.5)
    return tmp_path


@pytest.mark.usefixtures("hung")
def test_one_limit_for_all_questions() -> None:
    begun = time.monotonic()
    seen = nvidia.look()
    assert seen.smi.late and time.monotonic() - begun < 40  # not the program's 60 s
    report = ranks.look_at_machine(validate({}), several_machines=False)
    assert "driver" in [each.check for each in report.findings if each.level == "stop"]
    # What a run on CPUs does not use does not stop it.
    report = ranks.look_at_machine(
        validate({"mesh": {"device": "cpu"}}), several_machines=False
    )
    assert [each.level for each in report.findings if each.check == "driver"] == ["warning"]
    assert not [each for each in report.findings if each.level == "stop"]


def test_interface_for_nccl_does_not_stop_a_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    report = ranks.look_at_machine(validate({}), several_machines=False)
    assert [each.level for each in report.findings if each.check == "NCCL"][:1] == ["warning"]


def test_json_says_that_it_stops_whenever_it_does(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--json", "--mesh.dp", "3", "--mesh.dp_shard", "2")
    told = json.loads(done.stdout)
    assert done.returncode != 0 and (told["schema"], told["stop"]) == (1, True)
    (fault,) = [each for each in told["findings"] if each["level"] == "stop"]
    assert fault["check"] == "request" and fault["what"] in done.stderr
    fine = json.loads(command(tmp_path, "doctor", "--json", "--mesh.device", "cpu").stdout)
    assert (fine["schema"], fine["stop"]) == (1, False)
