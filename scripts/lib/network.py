# extra: launcher or preflight or benchmark or template
"""Find the addresses and interfaces of this machine, with the standard library only."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress
from pathlib import Path

from utils.settings.errors import UserError

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # requests of Linux for an interface's address and netmask


def resolve(name: str) -> list[str]:
    """Return the addresses of a name. Raises socket.gaierror."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def has_ipv4_loopback() -> bool:
    """Return whether this machine has 127.0.0.1. A machine with IPv6 alone may have only ::1."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError:
        return False
    return True


def find_local_address(address: str) -> str:
    """Return this machine's address on its route to another one, without sending anything.

    Raises:
        OSError: if there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def list_addresses() -> dict[str, str]:
    """Return each interface's IPv4 address with its prefix length, such as {"eth0": "10.0.0.1/24"}.

    The result is empty on systems other than Linux.
    """
    by_interface = {}
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface may have no address
                query = name.encode().ljust(256, b"\0")
                codes = (SIOCGIFADDR, SIOCGIFNETMASK)
                address, mask = (socket.inet_ntoa(fcntl.ioctl(sock, code, query)[20:24]) for code in codes)
                by_interface[name] = f"{address}/{ipaddress.ip_network(f'0.0.0.0/{mask}').prefixlen}"
    return by_interface


def find_interface(address: str) -> str:
    """Return the interface of this machine that has this address (empty: it is unknown)."""
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines() if ":" in address else ():
            words = line.split()
            if ipaddress.IPv6Address(int(words[0], 16)) == ipaddress.IPv6Address(address.split("%")[0]):
                return words[5]
    return next((name for name, cidr in list_addresses().items() if cidr.split("/")[0] == address), "")


def check_interfaces(env: dict[str, str]) -> None:
    """Raise UserError if a variable names an interface that this machine does not have."""
    existing = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = env.get(variable, "")
        if variable.startswith("GLOO") and given.startswith(("^", "=")):
            raise UserError(
                f"{variable} must be interfaces such as eth0, without the ^ and = of NCCL, got {given}. Give one of"
                f" {', '.join(existing)}, or unset {variable} to use the route to node 0."
            )
        if not given or given.startswith("^"):
            continue
        is_exact = variable.startswith("GLOO") or given.startswith("=")  # NCCL matches prefixes
        for name in given.removeprefix("=").split(","):
            if not any(interface == name or (not is_exact and interface.startswith(name)) for interface in existing):
                raise UserError(
                    f"{variable} must name an interface of {socket.gethostname()}, got {given}. Give one of"
                    f" {', '.join(existing)}, or unset {variable} to use the route to node 0."
                )


def explain_connection_error(error: OSError) -> str:
    """Explain why a connection failed. Each cause has a different fix."""
    if error.errno == errno.ECONNREFUSED:
        return "connection refused, nothing is listening there"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "no route to host, or no machine has that address"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer, the machine is off or a firewall drops the packets"
    return (error.strerror or str(error)).lower()
