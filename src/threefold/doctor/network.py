"""The network of this machine: its interfaces, and which one gloo and NCCL would use. No torch.

gloo uses GLOO_SOCKET_IFNAME, else the interface with the hostname's address, else the loopback. NCCL uses
NCCL_SOCKET_IFNAME, else InfiniBand's interfaces (`ib*`), else any but `docker*` and `lo`.
"""

import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from threefold.doctor.findings import Finding, judged, note, stop, warning
from threefold.doctor.machine import text_of
from threefold.mesh import environment

_CLASS = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Interface:
    """One network interface; speed in Mbit/s, if it is known."""

    name: str
    address: str | None = None
    up: bool = True
    speed: int | None = None

    @property
    def loopback(self) -> bool:
        return self.name == "lo" or (self.address or "").startswith("127.")

    def __str__(self) -> str:
        speed = f", {self.speed} Mbit/s" if self.speed else ""
        return f"{self.name} {self.address or 'without an IPv4 address'}{speed}{'' if self.up else ', down'}"


@dataclass(frozen=True)
class Network:
    """Interfaces, the address that the hostname resolves to, InfiniBand ports, and the variables that choose."""

    host: str
    interfaces: Sequence[Interface] = ()
    host_address: str | None = None
    infiniband: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    """what the user has set, where ranks that are started here have another value."""


def look(environ: Mapping[str, str]) -> Network:
    """Reads this machine."""
    host = socket.gethostname()
    try:
        address: str | None = socket.gethostbyname(host)
    except OSError:
        address = None
    interfaces = tuple(_interface(name) for _, name in socket.if_nameindex())
    variables = {
        name: value for name, value in sorted(environ.items()) if name.startswith(_VARIABLES)
    }
    return Network(
        host,
        interfaces,
        address,
        tuple(_infiniband_ports()),
        variables,
        dict(environment.replaced),
    )


def judge(network: Network, *, several_machines: bool) -> list[Finding]:
    """What would keep ranks from meeting over this network."""
    usable = [each for each in network.interfaces if each.up and each.address]
    findings = [
        note("interfaces", "; ".join(map(str, usable)) or "none with an IPv4 address"),
        _gloo(network, usable, several_machines=several_machines),
        _nccl(network, usable),
        *_replaced(network, usable),
        *_infiniband(network.infiniband),
    ]
    if network.variables:
        findings.append(
            note(
                "variables",
                ", ".join(f"{name}={value}" for name, value in network.variables.items()),
            )
        )
    return findings


def _replaced(network: Network, usable: Sequence[Interface]) -> Iterator[Finding]:
    """What a launcher's ranks would use, where those that are started here stay on the loopback interface."""
    as_set = replace(network, variables={**network.variables, **network.replaced}, replaced={})
    chosen = {
        "GLOO_SOCKET_IFNAME": gloo_interface(as_set)[0],
        "NCCL_SOCKET_IFNAME": nccl_interface(as_set)[0],
    }
    for name, value in network.replaced.items():
        here = f"ranks that are started here use {network.variables.get(name)} in its place"
        if chosen.get(name) is None:
            yield stop(
                name,
                f"this machine has no interface {value}; {here}",
                _names(usable),
                f"unset {name}, or {name}=NAME of the interface that the machines share",
            )
        else:
            yield note(name, f"{value} is set; {here}")


def _infiniband(ports: Sequence[str]) -> list[Finding]:
    """A finding for each port; one that is down while others are up means a cable or a switch."""
    up = any("ACTIVE" in port and port.endswith("InfiniBand") for port in ports)
    findings = []
    for port in ports:
        fits = not (up and "DOWN" in port and port.endswith("InfiniBand"))
        findings.append(
            note("InfiniBand", port)
            if fits
            else warning(
                "InfiniBand",
                port,
                "all ports up: NCCL shares its work among them",
                "ibstat; look at its cable and its switch",
            )
        )
    return findings or [note("InfiniBand", "none")]


def gloo_interface(network: Network) -> tuple[Interface | None, str]:
    """The interface that gloo would use, and why."""
    if named := network.variables.get("GLOO_SOCKET_IFNAME"):
        by_name = {each.name: each for each in network.interfaces}
        return by_name.get(named.split(",")[0]), f"GLOO_SOCKET_IFNAME={named}"
    address = network.host_address
    own = next(
        (
            each
            for each in network.interfaces
            if address is not None and each.address == address
        ),
        None,
    )
    if own is not None or (address or "").startswith("127."):
        why = f"{network.host} resolves to {address}"
    else:
        why = f"{network.host} does not resolve to an address of this machine"
    return own or next((each for each in network.interfaces if each.loopback), None), why


def nccl_interface(network: Network) -> tuple[Interface | None, str]:
    """The first interface that NCCL would use for its sockets, and why."""
    usable = [each for each in network.interfaces if each.up and each.address]
    if named := network.variables.get("NCCL_SOCKET_IFNAME"):
        exact = named.startswith("=")
        excluded = named.startswith("^")
        names = named.lstrip("=^").split(",")

        def is_named(each: Interface) -> bool:
            return any(
                each.name == name if exact else each.name.startswith(name) for name in names
            )

        chosen = [each for each in usable if is_named(each) is not excluded]
        return (chosen[0] if chosen else None), f"NCCL_SOCKET_IFNAME={named}"
    ranked = sorted(
        usable,
        key=lambda each: (not each.name.startswith("ib"), each.loopback, _is_bridge(each)),
    )
    return (ranked[0] if ranked else None), "NCCL's own order"


def _gloo(network: Network, usable: Sequence[Interface], *, several_machines: bool) -> Finding:
    chosen, why = gloo_interface(network)
    others = [each.name for each in usable if not each.loopback and not _is_bridge(each)]
    hint = f"GLOO_SOCKET_IFNAME={others[0] if others else 'NAME'}, the one that the machines share, on all of them"
    if chosen is None:
        return stop(
            "gloo", f"{why}, but this machine has no such interface", _names(usable), hint
        )
    if chosen.loopback and several_machines:
        return stop(
            "gloo",
            f"would offer {chosen.address or '127.0.0.1'} to the other machines: {why}",
            "an address that they can reach",
            hint,
        )
    fits = not (chosen.loopback and others)
    return judged(
        "gloo",
        f"uses {chosen.name}: {why}",
        fits,
        "on one machine this is right; ranks on several machines could not connect to one another",
        f"for several machines: {hint}",
        otherwise="warning",
    )


def _nccl(network: Network, usable: Sequence[Interface]) -> Finding:
    chosen, why = nccl_interface(network)
    if chosen is not None:
        return note("NCCL", f"would use {chosen.name} for its sockets: {why}")
    return stop(
        "NCCL",
        f"{why}, but this machine has no such interface with an address",
        _names(usable),
        "NCCL_SOCKET_IFNAME=NAME, the one that the machines share, or unset it",
    )


def _names(interfaces: Sequence[Interface]) -> str:
    return (
        f"one of {', '.join(each.name for each in interfaces)}"
        if interfaces
        else "an interface with an address"
    )


def _is_bridge(interface: Interface) -> bool:
    return interface.name.startswith(
        ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali")
    )


def _interface(name: str) -> Interface:
    state, speed = (text_of(_CLASS / name / file) for file in ("operstate", "speed"))
    mbit_s = int(speed) if speed is not None and speed.isdecimal() else None
    return Interface(name, _address(name), up=state in (None, "up", "unknown"), speed=mbit_s)


def _address(name: str) -> str | None:
    """The interface's IPv4 address, from the kernel."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(
                asking.fileno(), get_address, struct.pack("256s", name.encode()[:15])
            )
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _infiniband_ports() -> list[str]:
    ports = []
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        state, rate, layer = (text_of(port / name) for name in ("state", "rate", "link_layer"))
        ports.append(
            f"{port.parts[-3]} port {port.name}: {state or 'unknown'}, {rate or '?'}, {layer or '?'}"
        )
    return ports
