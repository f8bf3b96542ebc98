"""The actor runtime: the only place with tasks and clocks. See `system.py`."""

from swactor_core.actors.driver import MachineActor
from swactor_core.actors.system import Actor, ActorStopped, ActorSystem, MailboxFull

__all__ = ["Actor", "ActorStopped", "ActorSystem", "MachineActor", "MailboxFull"]
