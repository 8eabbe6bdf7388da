"""What its kernel withholds from a rank, as counters in /proc and of its cgroup: the reasons why it is slow.

Read once a second by a thread of the rank's own, which does not wait for anyone. What cannot be read (no /proc, no
cgroup, a container that hides them) is left out.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from threefold.training.progress import proc_text


def counters() -> dict[str, float]:
    """What has been counted of this process until now, by name."""
    found = {"major_faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt)}
    # The eighth number, in ticks of all cores together; the first five are always there.
    if (stolen := re.match(r"cpu +(?:\d+ ){7}(\d+)", proc_text("stat"))) is not None:
        found["stolen_s"] = int(stolen[1]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    for folder in cgroup_folders("cpu"):
        # Of version 2 in microseconds, of version 1 in nanoseconds; a quota may be that of a cgroup around its own.
        if (
            throttled := line_of(folder / "cpu.stat", r"^throttled_(usec|time) (\d+)")
        ) is not None:
            throttled_s = int(throttled[2]) / (1e6 if throttled[1] == "usec" else 1e9)
            found["throttled_s"] = max(throttled_s, found.get("throttled_s", 0.0))
    return found


def cgroup_folders(controller: str) -> Iterator[Path]:
    """Where a controller keeps files on this process, in cgroups of version 1 and 2: its own, then those around it."""
    for line in proc_text("self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            # A container may see its own as the root.
            folder = Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
            yield from (folder, *folder.parents)


def line_of(path: Path, pattern: str) -> re.Match[str] | None:
    """The first line that matches; None if there is none, or no such file."""
    try:
        return re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
