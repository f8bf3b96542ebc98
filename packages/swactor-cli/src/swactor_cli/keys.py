"""Where this machine keeps its keys, and what is public of them. Key files are made at first use.

Knows files and the transport plug-in's key derivation, no cluster.
"""

from __future__ import annotations

from pathlib import Path

from swactor_core.config import PluginChoice, checked_name
from swactor_core.node.identity import state_directory
from swactor_core.plugins import Plugins
from swactor_core.spi.provider import Kind


def orchestrator_key_file() -> Path:
    """The key with which this machine runs models on clusters."""
    return state_directory() / "orchestrator.key"


def node_key_file(name: str) -> Path:
    """The key of the node of that name on this machine. Raises ConfigError for what cannot be a name."""
    return state_directory() / "nodes" / f"{checked_name(name)}.key"


def public_key_of(seed: bytes, plugins: Plugins, choice: PluginChoice) -> str:
    """Hexadecimal, as cluster files hold it."""
    transport = plugins.select(Kind.TRANSPORT, choice.transport).make()
    return bytes(transport.public_key(seed)).hex()
