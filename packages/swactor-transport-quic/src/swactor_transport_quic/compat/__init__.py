"""The one place that touches aioquic's private names; checked at import, so that a drift is named at once.

`connection` has the overrides that the rest of the package uses, `arriving` and `packets` the short way of
1-RTT packets, `moving` what happens when a peer's address changes, `names` the table of private names.
"""

import logging

from swactor_transport_quic.compat.names import check_names, missing_names, private_names

check_names(private_names())  # before the overrides below, which a missing name would break less clearly

from swactor_transport_quic.compat.connection import (  # noqa: E402 - after the check, as it says
    MAX_DATA,
    BurstLimit,
    Connection,
    Ending,
    ReceiveHalf,
    SendHalf,
    StreamLimits,
)

# aioquic tells every connection's steps at INFO and every packet's at DEBUG, which costs on the hot path.
_aioquic_logger = logging.getLogger("quic")
if _aioquic_logger.level == logging.NOTSET:
    _aioquic_logger.setLevel(logging.WARNING)

__all__ = [
    "MAX_DATA",
    "BurstLimit",
    "Connection",
    "Ending",
    "ReceiveHalf",
    "SendHalf",
    "StreamLimits",
    "check_names",
    "missing_names",
    "private_names",
]
