"""Inside the orchestrator: evidence, the operator, and the token endpoint (spec section 13)."""

from __future__ import annotations

from swactor_core.faults import Fault
from swactor_core.ids import NodeId, Sequence
from swactor_core.values import frozen


@frozen
class NodeLost:
    """Evidence that a node is gone: a dead process, a broken link, or membership's verdict."""

    node_id: NodeId
    by_membership: bool
    detail: str


@frozen
class OperatorStop:
    """The operator asks for the run's orderly end."""


@frozen
class InjectTokens:
    """Run to token endpoint: write these ids as the token-in object of `sequence`."""

    sequence: Sequence
    token_ids: tuple[int, ...]


@frozen
class TokenReceived:
    """Token endpoint to run: the token-out object of `sequence` said this id. `enough`: whoever reads the
    answer wants no token after it."""

    sequence: Sequence
    token_id: int
    enough: bool = False


@frozen
class EndpointsReady:
    """Both local token edges are ready."""


@frozen
class EndpointsFailed:
    fault: Fault


@frozen
class StopEndpoints:
    pass


@frozen
class EndpointsStopped:
    unproven: tuple[str, ...] = ()
