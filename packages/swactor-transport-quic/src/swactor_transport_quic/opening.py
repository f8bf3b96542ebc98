"""When a stream is open: the peer has acknowledged its first bytes.

A connection may look usable and be over: its other side ended it while nothing passed between the two. What
is opened on it then would break for no fault of anybody's. Until its first bytes are acknowledged a stream
carries nothing else, so it can be opened anew on another connection and no byte is repeated. Knows links and
what can be asked of a stream; knows no peer table, and dials nobody.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from swactor_core.errors import TransportError
from swactor_core.ids import EdgeId, NodeId, node_hex
from swactor_core.wire import encode_preamble

from swactor_transport_quic.control import CHANNEL_HELLO, QuicControlChannel
from swactor_transport_quic.edges import QuicSendEdge
from swactor_transport_quic.link import Link, LinkState

NO_MORE_STREAMS = "allows no more streams on this connection"
FORMER_UNDER_WAY = "has not acknowledged the end of the former one"


class Opened(Protocol):
    """A stream whose first bytes are on their way."""

    @property
    def reached(self) -> bool: ...
    def withdraw(self) -> None: ...


def open_edge(link: Link, peer: NodeId, edge_id: EdgeId) -> QuicSendEdge | str:
    """Its preamble is on its way; or why it has to wait. Raises TransportError for an edge that is open."""
    for handler in link.handlers.values():
        if isinstance(handler, QuicSendEdge) and handler.edge_id == edge_id:
            if not handler.ended:
                raise TransportError(
                    f"edge {edge_id} to peer {node_hex(peer)} is already open",
                    hint="finish or abort it first, or take another id",
                )
            # Datagrams overtake each other, and a new stream that arrived first would be refused.
            return FORMER_UNDER_WAY
    half = link.quic.open_stream(encode_preamble(edge_id), is_unidirectional=True)
    if half is None:
        return NO_MORE_STREAMS
    edge = QuicSendEdge(link, half, edge_id)
    link.flush()
    return edge


def open_channel(link: Link) -> QuicControlChannel | str:
    """Its hello is on its way; or why it has to wait."""
    half = link.quic.open_stream(CHANNEL_HELLO, is_unidirectional=False)
    if half is None:
        return NO_MORE_STREAMS
    receive = link.quic.receive_half(half.stream_id)
    assert receive is not None
    channel = QuicControlChannel(link, half, receive, opener=True)
    link.flush()
    return channel


async def stream_slot(link: Link, left: float, what: str, why: str) -> None:
    """Waits until something happened on the link that may let one more stream open."""
    assert link.peer is not None
    if left <= 0 or not await link.activity.wait(left):
        raise TransportError(
            f"peer {node_hex(link.peer)} {why}, {what} stays shut",
            hint="close finished edges, or raise max_edges or max_channels of that peer",
        )


async def reached(link: Link, stream: Opened, until: float, what: str, *, deadline: float) -> bool:
    """Waits until the peer has the stream; False when the link ended before anybody heard of that. The stream
    is withdrawn when this is cancelled or, at the loop's time `until`, raises TransportError; that names
    `deadline`, in seconds."""
    assert link.peer is not None
    loop = asyncio.get_running_loop()
    try:
        while True:
            link.quic.settle()  # an acknowledgement may have come with what ended the link
            if stream.reached:
                return True
            if link.state is LinkState.CLOSED:
                return False
            if not await link.activity.wait(until - loop.time()):
                raise TransportError(
                    f"peer {node_hex(link.peer)} does not acknowledge {what} within {deadline:.3g} s",
                    hint="check that it runs, and that UDP passes both ways",
                )
    except BaseException:
        stream.withdraw()
        raise
