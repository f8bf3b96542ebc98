"""The address that a process tells others to reach it at, when it listens on every address.

Asks the routing table, sends nothing. Knows no transport and no membership.
"""

from __future__ import annotations

import ipaddress
import socket

from swactor_core.config import split_host_port
from swactor_core.errors import ConfigError
from swactor_core.unwaited import UnwaitedThreads

RESOLVE_SECONDS = 10.0


def advertised_host(bind_host: str, advertise_host: str, seeds: tuple[str, ...]) -> str:
    """What is given, else the bound address, else the address this machine has towards the first seed.

    Raises ConfigError when it listens everywhere and neither an address nor a usable seed is given.
    """
    if advertise_host:
        return advertise_host
    if not is_wildcard(bind_host):
        return bind_host
    for seed in seeds:
        found = _own_address_towards(*split_host_port(seed))
        if found is not None:
            return found
    raise ConfigError(
        f"it listens on {bind_host!r}, and nothing says at which address others reach it"
        + (f": no seed of {', '.join(seeds)} can be resolved or routed to" if seeds else ""),
        hint="give --advertise HOST (advertise_host in the cluster file's table), or name a seed that can be "
        "reached",
    )


def is_wildcard(host: str) -> bool:
    """Whether `host` means every address of this machine."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _own_address_towards(host: str, port: int) -> str | None:
    """The source address of a datagram to `host`; None when there is no route, no such name, or nobody who
    knows it within RESOLVE_SECONDS: no signal ends a resolver's wait."""
    try:
        asked = UnwaitedThreads().submit(socket.getaddrinfo, host, port or 1, 0, socket.SOCK_DGRAM)
        family, kind, protocol, _, address = asked.result(RESOLVE_SECONDS)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the latter for what no host name can be
        return None
    return None if is_wildcard(own) else own
