"""Addresses, interfaces and ports of this machine, by the standard library. What only Linux tells is empty
elsewhere."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path

from config import UserError

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # Linux: the address of an interface, and its mask


def resolve(name: str) -> list[str]:
    """The addresses of a name. Raises socket.gaierror."""
    return list(dict.fromkeys(found[4][0] for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def own_address_to(address: str) -> str:
    """This machine's address on its route to another; nothing is sent. Raises OSError where there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface with the length of its network, as {"eth0": "10.0.0.1/24"}; none where this is
    no Linux."""
    found = {}
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                query = name.encode().ljust(256, b"\0")
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(asked, code, query)[20:24]) for code in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
                found[name] = f"{address}/{ipaddress.ip_network(f'0.0.0.0/{mask}').prefixlen}"
    return found


def interface_of(address: str) -> str:
    """The interface that has this address of this machine; empty where that cannot be seen."""
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines() if ":" in address else ():
            words = line.split()
            if ipaddress.IPv6Address(int(words[0], 16)) == ipaddress.IPv6Address(address.split("%")[0]):
                return words[5]
    return next((name for name, each in addresses().items() if each.split("/")[0] == address), "")


def check_interfaces(env: dict[str, str]) -> None:
    """Raises UserError when a variable names an interface that this machine does not have."""
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = env.get(variable, "")
        if not given or given.startswith("^"):
            continue
        is_exact = variable.startswith("GLOO") or given.startswith("=")  # NCCL takes the beginnings of names
        for name in given.removeprefix("=").split(","):
            if not any(each == name or (not is_exact and each.startswith(name)) for each in there):
                said = f"{socket.gethostname()} has no interface {name} (it has {', '.join(there)})"
                raise UserError(
                    f"{variable}={given}: {said}; name one of them, or leave it out: the route to node 0 decides"
                )


def owner_of(port: int) -> str:
    """The process of this machine that listens on a port, as "process 12 (python train.py)"; empty where it cannot be
    seen."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:  # 0A: it listens
                    sockets.add(f"socket:[{words[9]}]")
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with suppress(OSError):
            if any(os.readlink(descriptor) in sockets for descriptor in (process / "fd").iterdir()):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({line[:80]})"
    return ""


def why(error: OSError) -> str:
    """What a connection that was not made met: told apart, since the remedies differ."""
    if error.errno == errno.ECONNREFUSED:
        return "refused: nothing listens there"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "no route to it, or nobody has that address"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer at all: the machine is off, or a firewall drops what comes"
    return (error.strerror or str(error)).lower()
