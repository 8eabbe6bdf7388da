"""Hosts on one machine: a network namespace each, with a hostname of its own, on a bridge that leads nowhere."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_NETWORK = "10.78.0"


@functools.cache
def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux'"
    if os.geteuid():
        return "making network namespaces needs root"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here (iproute2, util-linux)"
    # A host needs its links, a hostname and a file over /etc/hosts; containers may forbid any of them.
    with (
        contextlib.suppress(OSError, subprocess.CalledProcessError),
        hosts("probe", 1) as (probe,),
    ):
        probe.run(["true"])
        return None
    return "this container may not make network namespaces"


class Host:
    """One of them."""

    def __init__(self, name: str, number: int, unique: str) -> None:
        self.namespace = f"{unique}n{number}"
        self.hostname = f"{name}-{number}"
        self.address = f"{_NETWORK}.{10 + number}"
        self._link = f"{unique}v{number}"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The arguments as run on this host; what they start dies with it."""
        inside = [
            "unshare",
            "--uts",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            self.hostname,
        ]
        return ["ip", "netns", "exec", self.namespace, *inside, *arguments]

    def run(self, arguments: Sequence[str]) -> None:
        subprocess.run(self.command(arguments), check=True, capture_output=True)

    def start(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: Path
    ) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                self.command(arguments),
                cwd=cwd,
                env=dict(env),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def cut_off(self) -> None:
        """Takes the cable out: nothing arrives and nobody is told."""
        _ip("link", "set", self._link, "down")

    def connect(self) -> None:
        _ip("link", "set", self._link, "up")

    def kill_all(self) -> None:
        """Kills every process on it."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True
        )
        for process in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), 9)


@contextlib.contextmanager
def hosts(name: str, count: int) -> Iterator[list[Host]]:
    """`count` hosts that reach one another and nothing else, called NAME-1 and so on."""
    # Links and namespaces are the machine's: other tests may run beside these, and one that was killed left its own.
    unique = f"tf{secrets.token_hex(4)}"
    found = [Host(name, number, unique) for number in range(1, count + 1)]
    bridge = f"{unique}br"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in found:
            _make(host, bridge, found)
        yield found
    finally:
        for host in found:
            host.kill_all()
            # A namespace goes when its last process has, and its link only then; the next test wants the names.
            subprocess.run(["ip", "link", "del", host._link], capture_output=True)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _make(host: Host, bridge: str, all_hosts: Sequence[Host]) -> None:
    _ip("netns", "add", host.namespace)
    _ip(
        "link",
        "add",
        host._link,
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        host.namespace,
    )
    _ip("link", "set", host._link, "master", bridge, "up")
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _ip("-n", host.namespace, "link", "set", device, "up")
    # `ip netns exec` mounts what is here over /etc.
    etc = Path("/etc/netns") / host.namespace
    etc.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{each.address} {each.hostname}" for each in all_hosts)]
    (etc / "hosts").write_text("\n".join(lines) + "\n")
    (etc / "resolv.conf").write_text("")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(['ip', *arguments])}: {done.stderr.strip()}")
