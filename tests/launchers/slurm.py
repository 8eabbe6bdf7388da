"""A real Slurm on one machine: two hosts as network namespaces, a controller and two daemons, munge with its own key.

Nothing is installed or configured on the machine: every file lies in the test's folder, and all daemons end with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ranks.faults import wait_for
from ranks.two_hosts import Host, hosts
from ranks.two_hosts import why_not as why_no_hosts

_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
_SBIN = "/usr/sbin:/usr/bin:/sbin:/bin"

# `ip netns exec` mounts a /sys of its own, without what is mounted in it; slurmd wants to see a file system there.
_WITH_CGROUP = ("sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup; exec "$@"', "sh")

_CONF = """\
ClusterName=threefold
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
JobRequeue=1
KillWait=30
MinJobAge=300
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no such cluster here, or None."""
    if (reason := why_no_hosts()) is not None:
        return reason
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_SBIN) is None]
    return f"no {', '.join(missing)} here (Debian: slurm-wlm, munge)" if missing else None


class Cluster:
    """Two nodes of eight cores each, as Slurm believes."""

    def __init__(self, folder: Path, nodes: list[Host]) -> None:
        self.folder = folder
        self.nodes = nodes
        self._conf = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._conf), "PATH": f"{os.environ['PATH']}:{_SBIN}"}

    def run(
        self, *arguments: str, cwd: Path, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """A command on the first node."""
        return subprocess.run(
            self.nodes[0].command(arguments),
            cwd=cwd,
            env={**env, **self.environment},
            capture_output=True,
            text=True,
            timeout=150,
        )

    def start(self) -> None:
        (self.folder / "state").mkdir()
        for node in self.nodes:
            (self.folder / f"spool-{node.hostname}").mkdir()
        munge = self.folder / "munge.socket"
        lines = [
            f"NodeName={node.hostname} NodeAddr={node.address} CPUs=8 RealMemory=8000"
            for node in self.nodes
        ]
        self._conf.write_text(
            _CONF.format(
                controller=self.nodes[0].hostname,
                address=self.nodes[0].address,
                folder=self.folder,
                munge=munge,
                nodes="\n".join(lines),
                names=",".join(node.hostname for node in self.nodes),
            )
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {
            "socket": munge,
            "key-file": key,
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "seed",
        }
        options = [f"--{name}={self.folder / path}" for name, path in files.items()]
        self._daemons.append(
            subprocess.Popen(
                [shutil.which("munged", path=_SBIN) or "", "--foreground", "--force", *options],
                stdout=subprocess.DEVNULL,
                stderr=(self.folder / "munged.err").open("wb"),
            )
        )
        wait_for(munge.exists, "munged's socket")
        self._daemon(self.nodes[0], "slurmctld", "-D", "-c", "-i")
        for node in self.nodes:
            self._daemon(node, "slurmd", "-D", "-N", node.hostname)
        try:
            wait_for(self._idle, "two idle nodes", within_s=120)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._logs()}") from None

    def _daemon(self, node: Host, program: str, *arguments: str) -> None:
        env = {**os.environ, **self.environment}
        output = self.folder / f"{program}-{node.hostname}.out"
        self._daemons.append(
            node.start(
                [*_WITH_CGROUP, shutil.which(program, path=_SBIN) or "", *arguments],
                cwd=self.folder,
                env=env,
                output=output,
            )
        )

    def _idle(self) -> bool:
        done = self.run("sinfo", "-h", "-N", "-o", "%T", cwd=self.folder, env=dict(os.environ))
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        for node in self.nodes:
            node.kill_all()
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(5)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster that lives in `folder`, which must be new."""
    folder.mkdir()
    with hosts("tfslurm", 2) as nodes:
        made = Cluster(folder, nodes)
        try:
            made.start()
            yield made
        finally:
            made.stop()
