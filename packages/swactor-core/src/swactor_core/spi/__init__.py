"""The typed interfaces that plug-ins implement. Guarantees and errors are stated per method.

Imports the vocabulary only. A plug-in hands out a `Provider` per kind through `hookspecs.py`; the runtime
then calls these interfaces directly, never through a hook.
"""

from typing import TYPE_CHECKING

from swactor_core.lazy import found_in

if TYPE_CHECKING:
    from swactor_core.spi.arena import Arena, ArenaView, Ring
    from swactor_core.spi.loader import Loader, Model, ModelFacts, TensorRef, TextStream, Tokenizer
    from swactor_core.spi.membership import Member, Membership, MembershipContext, MemberState
    from swactor_core.spi.provider import Kind, Provider
    from swactor_core.spi.transport import ControlChannel, RecvEdge, SendEdge, Transport, TransportContext
    from swactor_core.spi.worker import DeviceBridge, StageRole, WorkerBackend

__all__ = [
    "Arena",
    "ArenaView",
    "ControlChannel",
    "DeviceBridge",
    "Kind",
    "Loader",
    "Member",
    "MemberState",
    "Membership",
    "MembershipContext",
    "Model",
    "ModelFacts",
    "Provider",
    "RecvEdge",
    "Ring",
    "SendEdge",
    "StageRole",
    "TensorRef",
    "TextStream",
    "Tokenizer",
    "Transport",
    "TransportContext",
    "WorkerBackend",
]

if not TYPE_CHECKING:
    __getattr__ = found_in(
        __name__, __all__, ("provider", "arena", "loader", "worker", "membership", "transport")
    )
