"""A peer whose address changes under an established connection, as behind a translator that has forgotten it.

For the side that accepted, RFC 9000 section 9.3 and aioquic do it all: the newest packet shows the dialler's
address, which is challenged, gets three times what came from it until it has answered, and is left again for
the last proved one otherwise. For the side that dialled, section 9 has what comes from elsewhere dropped, for
servers do not move. Here an acceptor may stand behind a translator as well, so what comes from elsewhere is
heard, and followed only when nothing arrives any more where the peer was. Knows no socket and no clock.
"""

from __future__ import annotations

from typing import Any

from aioquic import tls
from aioquic.quic.connection import QuicConnection, QuicConnectionState, QuicNetworkPath

_TIMEOUTS = 2
"""Probe timeouts in a row after which the known address is taken to be dead. Whoever only repeats the peer's
packets from another address cannot bring them about: what is sent to the known one is still acknowledged."""
_ASK_AGAIN = 0.1
"""Seconds between questions to the known address, while packets come from elsewhere and it answers."""
_UNANSWERED = 3
"""Probe timeouts, two in a row with their doubling, in which nothing since the question was acknowledged:
then the known address is dead too where small messages, sent again and again, put off each timeout."""
_CHALLENGES = 5
"""Unanswered ones from elsewhere that are kept; a peer that proves an address sends one or two."""


class MovingPeer(QuicConnection):
    """`elsewhere`, of the dialling side only, is the path not in use that the newest packet came by; None
    when that came from the known address."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.elsewhere: QuicNetworkPath | None = None
        self._asked_at = 0.0
        self._asked_from: int | None = None
        """The first packet number of which an acknowledgement is an answer; None when nothing was asked."""

    def receive_datagram(self, data: bytes, addr: Any, now: float) -> None:
        paths = self._network_paths
        if (
            not self._is_client
            or not self._handshake_confirmed
            or self._state is not QuicConnectionState.CONNECTED
            or (paths[0].addr == addr and self.elsewhere is None)
        ):
            super().receive_datagram(data, addr, now)
            return
        path = next((path for path in paths if path.addr == addr), None)
        stranger = None
        if path is None:
            known = self.elsewhere
            path = stranger = known if known is not None and known.addr == addr else QuicNetworkPath(addr)
            paths.append(stranger)  # for as long as aioquic looks whether it knows the address
        space = self._spaces[tls.Epoch.ONE_RTT]
        newest = space.largest_received_packet
        super().receive_datagram(data, addr, now)
        if stranger is not None:
            self._network_paths.remove(stranger)
            # Answered where the peer is known to be: what a stranger repeats gives it no answer of its own.
            kept = self._network_paths[0].remote_challenges
            kept.extend(list(stranger.remote_challenges)[: max(0, _CHALLENGES - len(kept))])
            stranger.remote_challenges.clear()
        if space.largest_received_packet > newest and self._state is QuicConnectionState.CONNECTED:
            if path is self._network_paths[0]:
                self.elsewhere = None
            else:
                self.heard_elsewhere(path, now)

    def heard_elsewhere(self, path: QuicNetworkPath, now: float) -> None:
        """The newest packet came by `path`, and what it acknowledges is settled: asks whether the known
        address still takes what is sent there."""
        self.elsewhere = path
        # A question that waits for its answer is sent again by each probe timeout: a new one would put those
        # off. And each answer is heard elsewhere as well: without a pause it would be asked about.
        pause = max(_ASK_AGAIN, 2 * self._loss.get_probe_timeout())
        if self._answered() and now >= self._asked_at + pause:
            self._asked_at, self._asked_from = now, self._packet_number
            self._ping_pending.append(0)
        self._follow(now)

    def _answered(self) -> bool:
        asked, space = self._asked_from, self._spaces[tls.Epoch.ONE_RTT]
        return asked is None or space.largest_acked_packet >= asked

    def handle_timer(self, now: float) -> None:
        super().handle_timer(now)
        if self.elsewhere is not None and self._state is QuicConnectionState.CONNECTED:
            self._follow(now)

    def _follow(self, now: float) -> None:
        """Sends where the peer was last heard, if nothing is acknowledged where it was known to be."""
        path, paths, loss = self.elsewhere, self._network_paths, self._loss
        if path is None or path is paths[0] or not paths[0].is_validated:
            return
        ignored = (
            not self._answered()
            and self._packet_number > (self._asked_from or 0)
            and now >= self._asked_at + _UNANSWERED * loss.get_probe_timeout()
        )
        if loss._pto_count < _TIMEOUTS and not ignored:
            return
        self._asked_from = None
        self.elsewhere = None
        if path in paths:
            paths.remove(path)
        paths.insert(0, path)
        for left in paths[2:]:  # what stays is the new one and the one to return to
            paths.remove(left)
            if left.peer_cid is not None:
                self._retire_peer_cid(left.peer_cid)
        if path.peer_cid is not None:
            self._use_reserved_peer_cid(path)
        if not path.is_validated:
            path.local_challenge_sent = False
            # RFC 9000 section 8.2.4; set here because the challenge may have to wait for its allowance.
            path.validation_deadline = now + 3 * max(
                loss.get_probe_timeout(), 2 * self._configuration.initial_rtt
            )
        loss._pto_count = 0
        self._probe_pending = True

    def path_refused(self, addr: Any) -> bool:
        """Nothing listens at `addr`. False when that is no news of this peer: it is not where it is, or not
        proved to be there, and then it is left for the last proved address."""
        if not self._network_paths or self._network_paths[0].addr != addr:
            return False
        path = self._network_paths[0]
        if path.is_validated or not any(other.is_validated for other in self._network_paths):
            return True
        self._abandon_path_validation()
        return False
