"""What NVIDIA's tools report about the GPUs' health: nvidia-smi's report, NVLink's counters, the driver's Xid messages.

All of them run within one time limit, because each of them hangs if the driver is broken. `look` runs them; `judge`
computes with their answers, and needs neither torch nor a GPU.
"""

import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from threefold.doctor.findings import Finding, note, stop, warning

LIMIT_S = 10.0
_DISMISSED = "take the host out of the job: drain it, and let its GPU be tested"
_LOG = "sudo dmesg | grep -i -e xid -e nvrm shows why"
# NVIDIA's Xid catalogue: what no application causes, and after which a GPU computes no more, or wrongly.
_XIDS = {
    48: "an uncorrectable memory error",
    64: "a row of memory that cannot be replaced",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
    140: "an unrecovered memory error",
}
_SLOWED = {
    "hw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "its power supply asks it to",
    "sw_thermal_slowdown": "it is too hot",
}


@dataclass(frozen=True)
class Answer:
    """What a program printed, and its exit code; None: it was not there, or gave no answer in time."""

    text: str = ""
    code: int | None = None
    late: bool = False


@dataclass(frozen=True)
class Health:
    """One GPU, as `nvidia-smi -q -x` reports it; counts since the driver was loaded."""

    name: str
    bus: str
    memory: str = ""
    mig: bool = False
    uncorrected: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    recovery: str = "None"
    slowed: tuple[str, ...] = ()
    fabric: str = "N/A"


@dataclass(frozen=True)
class Nvidia:
    """The output of all the tools.

    Attributes:
        smi: nvidia-smi without arguments.
        listed: the GPUs that `nvidia-smi -L` names.
        link_errors: of each GPU that has some, the links' recovery and replay errors.
        inactive_links: number of inactive links of each GPU, if others are active.
        xids: the driver's messages, by bus and number.
        links: (GPU, GPU) -> kind, as nvidia-smi calls it.
    """

    smi: Answer = Answer()
    listed: Answer = Answer()
    gpus: Sequence[Health] = ()
    link_errors: Mapping[int, int] = field(default_factory=dict)
    inactive_links: Mapping[int, int] = field(default_factory=dict)
    xids: Mapping[tuple[str, int], int] = field(default_factory=dict)
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def installed(self) -> int | None:
        """GPUs that nvidia-smi lists, also those that it cannot talk to; None without an answer."""
        if self.listed.code is None:
            return None
        count = sum(line.startswith("GPU ") for line in self.listed.text.splitlines()) + len(
            _lost(self.listed.text)
        )
        return count or None


def look() -> Nvidia:
    """Asks nvidia-smi and the kernel's log, for `LIMIT_S` seconds at most in all."""
    ends = time.monotonic() + LIMIT_S
    ask_smi = partial(ask, "nvidia-smi", ends=ends)
    smi = ask_smi()
    if smi.code is None:
        return Nvidia(smi)
    listed = ask_smi("-L")
    matrix = ask_smi("topo", "-m")
    report = ask_smi("-q", "-x")
    errors = ask_smi("nvlink", "-e")
    states = ask_smi("nvlink", "-s")
    return Nvidia(
        smi,
        listed,
        read_health(report.text),
        read_link_errors(errors.text),
        read_inactive_links(states.text),
        read_xids(ask("dmesg", ends=ends).text),
        read_links(matrix.text),
    )


def ask(program: str, *arguments: str, ends: float) -> Answer:
    """A program's answer, until the time `ends`."""
    path = shutil.which(program)
    if path is None:
        return Answer()
    command = [path, *arguments]
    try:
        # A process that waits inside the driver cannot be killed: what it prints is read, and it is left behind.
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as run:
            try:
                text = run.communicate(timeout=max(0.1, ends - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                run.kill()
                run.returncode = -9  # do not wait for it
                return Answer(late=True)
    except OSError:
        return Answer()
    return Answer(text, run.returncode)


def judge(tools: Nvidia) -> list[Finding]:
    """What in the hardware would keep a run from working, or make it slow or wrong."""
    return [*_answers(tools), *_memory(tools), *_speed(tools), *_equal(tools)]


def read_health(text: str) -> list[Health]:
    """Each GPU of the XML that `nvidia-smi -q -x` prints; none if it is no such report."""
    try:
        log = ElementTree.fromstring(text[text.index("<nvidia_smi_log") :])
    except (ValueError, ElementTree.ParseError):
        return []
    return [_health(gpu) for gpu in log.iter("gpu")]


def _health(gpu: ElementTree.Element) -> Health:
    def text(path: str) -> str:
        return (gpu.findtext(path) or "").strip()

    reasons = [
        each
        for parent in ("clocks_event_reasons", "clocks_throttle_reasons")
        for each in gpu.iterfind(f"{parent}/*")
    ]
    slowed = [
        each.tag.partition("_reason_")[2]
        for each in reasons
        if (each.text or "").strip() == "Active"
    ]
    counts = gpu.findall("ecc_errors/volatile/*") + gpu.findall(
        "ecc_errors/volatile/double_bit/total"
    )
    uncorrected = [
        each for each in counts if "uncorrectable" in each.tag or each.tag == "total"
    ]
    return Health(
        text("product_name"),
        gpu.get("id", ""),
        text("fb_memory_usage/total"),
        text("mig_mode/current_mig") == "Enabled",
        sum(
            int(each.text)
            for each in uncorrected
            if each.text and each.text.strip().isdecimal()
        ),
        "Yes"
        in (
            text("remapped_rows/remapped_row_pending"),
            text("retired_pages/pending_retirement"),
        ),
        text("remapped_rows/remapped_row_failure") == "Yes",
        text("gpu_recovery_action") or "None",
        tuple(reason for reason in slowed if reason in _SLOWED),
        f"{text('fabric/state')}, {text('fabric/status')}"
        if text("fabric/state") not in ("", "N/A")
        else "N/A",
    )


def read_links(text: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> kind of link, from `nvidia-smi topo -m`; each pair once."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    num_gpus = sum(re.fullmatch(r"GPU\d+", name) is not None for name in header)
    links = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row:
            first = int(row[0][3:])
            links.update(
                {(first, second): row[1 + second] for second in range(first + 1, num_gpus)}
            )
    return links


def read_link_errors(text: str) -> dict[int, int]:
    """Replay and recovery errors of a GPU's links together, from `nvidia-smi nvlink -e`; of GPUs that have some."""
    return _by_gpu(
        text,
        lambda line: (
            int(each[1])
            if (each := re.search(r"(?:Replay|Recovery) Errors: (\d+)", line))
            else 0
        ),
    )


def read_inactive_links(text: str) -> dict[int, int]:
    """Links that are inactive, from `nvidia-smi nvlink -s`, of GPUs some of whose links are active."""
    inactive = _by_gpu(text, lambda line: "<inactive>" in line)
    active = _by_gpu(text, lambda line: "GB/s" in line)
    return {gpu: count for gpu, count in inactive.items() if gpu in active}


def _by_gpu(text: str, count: Callable[[str], int]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    gpu = None
    for line in text.splitlines():
        if (name := re.match(r"GPU (\d+):", line)) is not None:
            gpu = int(name[1])
        elif gpu is not None:
            counts[gpu] += count(line)
    return {gpu: number for gpu, number in counts.items() if number}


def read_xids(text: str) -> dict[tuple[str, int], int]:
    """How often the kernel's log has each of `_XIDS`, by (PCI bus, number)."""
    xids = re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", text)
    return dict(Counter((bus, int(number)) for bus, number in xids if int(number) in _XIDS))


def _lost(text: str) -> list[str]:
    """Buses of the GPUs that nvidia-smi cannot talk to, or their numbers where it names no bus."""
    lines = re.findall(r"Unable to determine the device handle for (.*)", text)
    bus = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
    return [
        match[0] if (match := bus.search(line)) else line.partition(":")[0] for line in lines
    ]


def _answers(tools: Nvidia) -> Iterator[Finding]:
    smi = tools.smi
    if smi.late or tools.listed.late:
        yield stop(
            "driver",
            f"nvidia-smi gave no answer in {LIMIT_S:g} s",
            "an immediate answer: ranks would wait as long, silently",
            f"{_LOG}; {_DISMISSED}, or reboot it",
        )
    elif "Driver/library version mismatch" in smi.text:
        what = "the driver's libraries were updated, and its kernel module is still the old one (nvidia-smi: mismatch)"
        modules = "nvidia_uvm nvidia_drm nvidia_modeset nvidia"
        yield stop(
            "driver",
            what,
            "libraries and a kernel module of one version",
            f"reboot, or while nothing uses the GPUs: sudo rmmod {modules}; sudo modprobe nvidia",
        )
    elif smi.code:
        reply = " ".join(smi.text.split())[:200]
        yield stop(
            "driver",
            f"nvidia-smi failed: {reply}",
            "a driver that answers",
            f"{_LOG}; install or load the driver (sudo modprobe nvidia); in a container: docker run --gpus all",
        )
    for bus in dict.fromkeys(_lost(smi.text) + _lost(tools.listed.text)):
        yield stop(
            "GPUs",
            f"nvidia-smi cannot talk to the GPU at {bus}",
            "every GPU of the host",
            f"{_LOG}; {_DISMISSED}, or reboot it",
        )
    for (bus, number), count in tools.xids.items():
        yield stop(
            "Xid",
            f"Xid {number} at PCI {bus}: {_XIDS[number]}"
            + (f", {count} times" if count > 1 else ""),
            "no such message since the host was started",
            f"{_LOG}; {_DISMISSED}, or reboot it",
        )


def _memory(tools: Nvidia) -> Iterator[Finding]:
    for number, gpu in enumerate(tools.gpus):
        name, at = f"GPU {number} memory", f"{gpu.name} at {gpu.bus}"
        if gpu.remap_failed:
            yield stop(
                name,
                f"{at}: a failed row could not be replaced",
                "memory that keeps what is written",
                f"{_DISMISSED} and replaced",
            )
        elif gpu.uncorrected:
            yield stop(
                name,
                f"{at}: {gpu.uncorrected} uncorrectable ECC errors since the driver was loaded",
                "none: a process that hits one dies",
                f"reset it (sudo nvidia-smi -r -i {number}) or reboot; if they come back, {_DISMISSED}",
            )
        elif gpu.remap_pending:
            yield warning(
                name,
                f"{at}: failed rows wait to be replaced",
                "none, before a long run",
                f"reset it while nothing uses it: sudo nvidia-smi -r -i {number}",
            )
        elif gpu.recovery not in ("None", "N/A"):
            yield stop(
                f"GPU {number}",
                f"{at}: its driver asks for {gpu.recovery!r}",
                "a GPU that needs no recovery",
                f"do so while nothing uses it: nvidia-smi -r -i {number}",
            )
        if gpu.mig:
            yield note(
                f"GPU {number} MIG",
                "on: a rank gets one part of this GPU, and NCCL cannot connect two parts of one",
            )
        if gpu.fabric not in ("N/A", "Completed, Success"):
            yield stop(
                "fabric",
                f"{at}: its fabric is not ready ({gpu.fabric})",
                "NVSwitch's fabric, which nvidia-fabricmanager builds when the host starts",
                "sudo systemctl restart nvidia-fabricmanager, of exactly the driver's version",
            )


def _speed(tools: Nvidia) -> Iterator[Finding]:
    for number, gpu in enumerate(tools.gpus):
        if gpu.slowed:
            why = " and ".join(dict.fromkeys(_SLOWED[reason] for reason in gpu.slowed))
            yield warning(
                f"GPU {number} clocks",
                f"{gpu.name} at {gpu.bus} is slowed: {why}",
                "full speed: all ranks wait for the slowest",
                "look at fans, air and power of the host; nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
            )
    for number, count in tools.link_errors.items():
        yield warning(
            "NVLink",
            f"GPU {number}: {count} replayed or recovered transfers since the driver was loaded",
            "none: each costs time, and many end in Xid 74",
            f"nvidia-smi nvlink -e; if they grow during a run, {_DISMISSED}",
        )
    for number, count in tools.inactive_links.items():
        yield warning(
            "NVLink",
            f"GPU {number}: {count} links are inactive",
            "all links active, as on its neighbours",
            f"nvidia-smi nvlink -s; {_DISMISSED}",
        )


def _equal(tools: Nvidia) -> Iterator[Finding]:
    kinds = Counter((gpu.name, gpu.memory) for gpu in tools.gpus)
    if len(kinds) > 1:
        each = "; ".join(
            f"{count} x {name} ({memory})" for (name, memory), count in kinds.items()
        )
        yield warning(
            "GPUs",
            f"are not equal: {each}",
            "one kind: all ranks wait for the slowest",
            "leave the others out: CUDA_VISIBLE_DEVICES",
        )
    by_nvlink = [pair for pair, kind in tools.links.items() if kind.startswith("NV")]
    others = [pair for pair in tools.links if pair not in by_nvlink]
    if by_nvlink and others and len(others) < len(by_nvlink):
        pairs = ", ".join(f"{a}-{b}" for a, b in others[:4])
        yield warning(
            "links",
            f"GPUs {pairs} connect over PCIe, the others over NVLink",
            "one kind",
            f"nvidia-smi topo -m and nvidia-smi nvlink -s; {_DISMISSED}",
        )
