"""A participant of a membership in a process of its own, to be stopped and continued as a whole.

`main` runs it: the provider's name, what it needs of a context in JSON, and the address of a seed as
arguments; it prints `ready` when it has started and ends with its stdin. Knows the membership interface only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from swactor_core.ids import node_id_of
from swactor_core.plugins import load_plugins
from swactor_core.spi.membership import MembershipContext, MembershipPlugin
from swactor_core.spi.provider import Kind

NAME = "bystander"
KEY = NAME.encode().ljust(32, b".")


def to_json(context: MembershipContext) -> dict[str, Any]:
    """What such a process needs of the context of one that it joins."""
    return {
        "cluster_id": context.cluster_id,
        "gossip_key": context.gossip_key.hex(),
        "settings": dict(context.settings),
    }


def context_of(data: Mapping[str, Any], seed: tuple[str, int]) -> MembershipContext:
    return MembershipContext(
        cluster_id=data["cluster_id"],
        gossip_key=bytes.fromhex(data["gossip_key"]),
        name=NAME,
        node_id=node_id_of(KEY),
        epoch=1,
        public_key=KEY,
        role="node",
        host="127.0.0.1",
        port=4321,
        bind_host="127.0.0.1",
        bind_port=0,
        seeds=(seed,),
        on_change=lambda member: None,
        settings=data["settings"],
    )


async def live(plugin: MembershipPlugin, context: MembershipContext) -> None:
    membership = plugin.create(context)
    await membership.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await membership.close()


def main() -> None:
    name, text, host, port = sys.argv[1:]
    plugin: MembershipPlugin = load_plugins().select(Kind.MEMBERSHIP, name).factory()
    asyncio.run(live(plugin, context_of(json.loads(text), (host, int(port)))))
