"""Timing and bounds of the protocol, as two profiles and the checks between values.

Pure data, in seconds everywhere: it must not know who is timed by it. `SwimSettings.detection_bound` is the
promise that tests hold the protocol to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from swactor_core.errors import ConfigError
from swactor_core.values import frozen


@frozen
class SwimSettings:
    """One participant's settings; participants of a cluster should have the same.

    A probe round lasts `probe_interval`; a member that has not answered directly within `probe_timeout` is
    asked again, also through `relays` others. Who has not answered when the round ends is suspected, and dead
    after `suspicion_min` to `suspicion_max`, the sooner the more others accuse it (`confirmations`).
    """

    probe_interval: float = 0.5
    probe_timeout: float = 0.25
    round_limit: int = 16
    """Members probed in one round: up to so many others, every one is probed in every round."""
    relays: int = 3
    exhaustive_relays: int = 8
    """With no more others than this, every one of them is asked to relay."""
    suspicion_min: float = 1.5
    suspicion_max: float = 2.0
    confirmations: int = 2
    isolation_factor: float = 3.0
    """Suspicions last `suspicion_max` times this while not one of several members answers: then it is more
    likely this participant that is cut off or starved."""
    strain_limit: int = 4
    """Rounds become at most 1 + this times longer while answers come late."""
    gossip_interval: float = 0.2
    gossip_fanout: int = 3
    retransmit: int = 6
    """A rumour is sent `retransmit * ceil(log10(members + 1))` times by each who learns it."""
    join_interval: float = 1.0
    seed_interval: float = 15.0
    """How often seeds that are not among the live members are tried again after joining."""
    sync_interval: float = 30.0
    reconnect_interval: float = 5.0
    """How often one dead member is asked whether it lives."""
    tombstone: float = 600.0
    """How long the dead and departed are remembered: longer than any rumour about them lives."""
    member_limit: int = 256
    packet_limit: int = 1200
    """Bytes of a datagram. Paths are asked for no more than QUIC asks them for (RFC 9000 section 14): over a
    tunnel that drops larger ones unsaid, members of a dozen would never learn of each other."""
    sync_replies_per_second: int = 20
    leave_attempts: int = 3

    def detection_bound(self, others: int) -> float:
        """Seconds within which a crashed member is Dead for a healthy observer of `others` members, of whom
        one at least answers: the rest of a round, a full round, the longest suspicion, some lateness."""
        rounds = math.ceil(others / self.round_limit)
        return (rounds + 1) * self.probe_interval + self.suspicion_max + self.probe_timeout

    def isolation_bound(self) -> float:
        """The same when none of several members answers any more."""
        return 2 * self.probe_interval + self.suspicion_max * self.isolation_factor + self.probe_timeout


LAN = SwimSettings()
LOCAL = SwimSettings(
    probe_interval=0.2,
    probe_timeout=0.1,
    suspicion_min=0.6,
    suspicion_max=1.0,
    gossip_interval=0.1,
    join_interval=0.3,
    seed_interval=5.0,
    sync_interval=15.0,
    reconnect_interval=2.0,
    tombstone=300.0,
)
PROFILES: Mapping[str, SwimSettings] = {"lan": LAN, "local": LOCAL}


def settings_from(values: Mapping[str, Any]) -> SwimSettings:
    """The profile named by `profile` (default `lan`) with single values replaced; `seed` is the driver's.

    Raises ConfigError for an unknown name, a value of the wrong kind, or values that contradict each other.
    """
    name = values.get("profile", "lan")
    if name not in PROFILES:
        raise ConfigError(
            f"membership profile {name!r}", hint=f"choose one of: {', '.join(sorted(PROFILES))}"
        )
    base = PROFILES[name]
    known = {field.name: type(getattr(base, field.name)) for field in fields(SwimSettings)}
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("profile", "seed"):
            continue
        if key not in known:
            raise ConfigError(
                f"membership setting {key!r} is unknown", hint=f"known: {', '.join(sorted(known))}"
            )
        changes[key] = _number(key, value, known[key])
    result = replace(base, **changes)
    _check(result)
    return result


def _number(key: str, value: Any, kind: type) -> float | int:
    fits = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if not fits or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"membership setting {key} = {value!r}", hint=f"give a number ({kind.__name__})")
    return int(value) if kind is int else float(value)


def _check(settings: SwimSettings) -> None:
    s = settings
    rules = (
        (0.01 <= s.probe_interval <= 60, f"probe_interval {s.probe_interval} is not within 0.01 to 60 s"),
        (0 < s.probe_timeout < s.probe_interval, "probe_timeout must be shorter than probe_interval"),
        (s.round_limit >= 1, "round_limit must be at least 1"),
        (0 <= s.relays <= 64 and 0 <= s.exhaustive_relays <= 64, "relays must be within 0 to 64"),
        (s.probe_interval <= s.suspicion_min, "suspicion_min must be at least one probe_interval"),
        (s.suspicion_min <= s.suspicion_max <= 600, "suspicion_max must be within suspicion_min to 600 s"),
        (s.confirmations >= 0, "confirmations must not be negative"),
        (1 <= s.isolation_factor <= 100, "isolation_factor must be within 1 to 100"),
        (0 <= s.strain_limit <= 100, "strain_limit must be within 0 to 100"),
        (
            s.gossip_interval > 0 and s.gossip_fanout >= 1,
            "gossip_interval and gossip_fanout must be positive",
        ),
        (1 <= s.retransmit <= 100, "retransmit must be within 1 to 100"),
        (min(s.join_interval, s.seed_interval, s.sync_interval) >= 0.05, "join, seed, sync: at least 0.05 s"),
        (s.reconnect_interval >= s.probe_interval, "reconnect_interval must be at least one probe_interval"),
        (s.tombstone >= 10 * s.suspicion_max, "tombstone must be at least ten times suspicion_max"),
        (2 <= s.member_limit <= 4096, "member_limit must be within 2 to 4096"),
        (1200 <= s.packet_limit <= 9000, "packet_limit must be within 1200 to 9000 bytes"),
        (s.sync_replies_per_second >= 1, "sync_replies_per_second must be at least 1"),
        (1 <= s.leave_attempts <= 10, "leave_attempts must be within 1 to 10"),
    )
    for holds, problem in rules:
        if not holds:
            raise ConfigError(f"membership settings: {problem}")
