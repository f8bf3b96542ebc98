"""Where the endpoints of this process find each other, and the script of what goes wrong between them.

`HUB` is the one of the process: empty before the first endpoint starts and after the last has closed, its
script cleared with it. Faults are ordered here and happen through the endpoints' own ways. Knows endpoints by
address and node id only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from swactor_core.errors import ResourceError, UsageError
from swactor_core.ids import EdgeId, NodeId

from swactor_testing.memory.edges import Damage
from swactor_testing.memory.link import Lane, Link

FIRST_PORT = 49152
T = TypeVar("T")
Between = tuple[NodeId | None, NodeId | None]


class Listener(Protocol):
    """A started endpoint, as the hub and other endpoints see it."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def links(self) -> tuple[Link, ...]: ...
    def links_to(self, node_id: NodeId) -> Iterable[Link]: ...
    def lanes_to(self, node_id: NodeId | None) -> Iterable[Lane]: ...
    def vanish(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Script:
    refused: dict[Between, str] = field(default_factory=dict)
    latencies: dict[Between, float] = field(default_factory=dict)
    held: set[Between] = field(default_factory=set)
    breaks: dict[EdgeId | None, int] = field(default_factory=dict)
    damages: dict[EdgeId | None, Damage] = field(default_factory=dict)


class MemoryHub:
    """Endpoints by (host, port). In a script None stands for every node; the nearer rule wins."""

    def __init__(self) -> None:
        self.endpoints: dict[tuple[str, int], Listener] = {}
        self._script = _Script()
        self._next_port = FIRST_PORT

    # endpoints

    def bind(self, host: str, port: int, listener: Listener) -> int:
        """The port it got: `port`, or a free one for 0. Raises ResourceError when it is taken."""
        if not port:
            while (host, self._next_port) in self.endpoints:
                self._next_port += 1
            port = self._next_port
            self._next_port += 1
        if (host, port) in self.endpoints:
            raise ResourceError(
                f"cannot listen on {host}:{port}: another endpoint of this process does",
                hint="take another port, or 0 for a free one",
            )
        self.endpoints[host, port] = listener
        return port

    def unbind(self, host: str, port: int) -> None:
        self.endpoints.pop((host, port), None)
        if not self.endpoints:
            self.clear()

    def clear(self) -> None:
        """Forgets the script; connections that live stay as they are."""
        self._script = _Script()
        self._next_port = FIRST_PORT

    # the script

    def refuse(self, why: str, *, dialler: NodeId | None = None, acceptor: NodeId | None = None) -> None:
        """From now on these dials fail and are tried again, until `allow`."""
        self._script.refused[dialler, acceptor] = why

    def allow(self) -> None:
        """Ends every refusal."""
        self._script.refused.clear()

    def delay(self, seconds: float, *, sender: NodeId | None = None, receiver: NodeId | None = None) -> None:
        """One-way latency of what these send, on connections that live and on later ones."""
        self._script.latencies[sender, receiver] = seconds
        for lane in self._lanes(sender, receiver):
            lane.latency = seconds

    def hold(self, *, sender: NodeId | None = None, receiver: NodeId | None = None) -> None:
        """Nothing that these send arrives, until `release`; nobody is told."""
        self._script.held.add((sender, receiver))
        for lane in self._lanes(sender, receiver):
            lane.held = True

    def release(self) -> None:
        """Ends every hold: what was kept arrives, in order."""
        self._script.held.clear()
        for lane in self._lanes(None, None):
            lane.release()

    def break_edge(self, edge_id: EdgeId | None = None, *, after: int) -> None:
        """An edge that is opened from now on, or each, breaks once so many bytes of it were taken."""
        self._script.breaks[edge_id] = after

    def damage_edge(self, edge_id: EdgeId | None = None, *, damage: Damage) -> None:
        """What an edge that is opened from now on, or each, carries arrives as `damage` has it."""
        self._script.damages[edge_id] = damage

    def lose(self, left: NodeId, right: NodeId, why: str = "cut, by script") -> None:
        """Every connection between the two breaks now; both hear of it. Raises UsageError for none."""
        links = [link for link in self.endpoint(left).links_to(right) if link.up]
        if not links:
            raise UsageError(f"no connection between {left:016x} and {right:016x} to lose")
        for link in links:
            link.lose(why)

    def vanish(self, node_id: NodeId, why: str = "its process is gone, by script") -> None:
        """The endpoint ends as a killed process does: others hear of it, itself does not."""
        self.endpoint(node_id).vanish(why)

    def endpoint(self, node_id: NodeId) -> Listener:
        """Raises UsageError for a node that has none."""
        for endpoint in self.endpoints.values():
            if endpoint.node_id == node_id:
                return endpoint
        raise UsageError(f"node {node_id:016x} has no endpoint in this process")

    # what endpoints ask

    def refusal(self, dialler: NodeId, acceptor: NodeId) -> str:
        return _nearest(self._script.refused, dialler, acceptor) or ""

    def latency(self, sender: NodeId, receiver: NodeId, default: float) -> float:
        found = _nearest(self._script.latencies, sender, receiver)
        return default if found is None else found

    def holds(self, sender: NodeId, receiver: NodeId) -> bool:
        return any(key in self._script.held for key in _keys(sender, receiver))

    def break_after(self, edge_id: EdgeId) -> int | None:
        breaks = self._script.breaks
        return breaks.get(edge_id, breaks.get(None))

    def damage(self, edge_id: EdgeId) -> Damage | None:
        damages = self._script.damages
        return damages.get(edge_id, damages.get(None))

    def _lanes(self, sender: NodeId | None, receiver: NodeId | None) -> list[Lane]:
        senders = [e for e in self.endpoints.values() if sender is None or e.node_id == sender]
        return [lane for endpoint in senders for lane in endpoint.lanes_to(receiver)]


def _keys(left: NodeId, right: NodeId) -> tuple[Between, ...]:
    return (left, right), (left, None), (None, right), (None, None)


def _nearest(rules: dict[Between, T], left: NodeId, right: NodeId) -> T | None:
    return next((rules[key] for key in _keys(left, right) if key in rules), None)


HUB = MemoryHub()
