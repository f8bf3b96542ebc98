"""What the static membership leaves to its script, in the words of the contract's overridable methods."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from swactor_core.spi.membership import MemberState
from swactor_testing.conformance import MembershipContract, bystander
from swactor_testing.conformance.membership import MembershipRig, Participant
from swactor_testing.static import CLUSTERS


class Scripted(MembershipContract):
    """Nobody is probed: the verdicts are the script's, as in every run with this mock."""

    __test__ = False

    async def kill(self, rig: MembershipRig, participant: Participant) -> None:
        await super().kill(rig, participant)
        CLUSTERS[rig.cluster_id].judge(participant.node_id, MemberState.DEAD)

    @contextlib.asynccontextmanager
    async def stopped(self, rig: MembershipRig, survivor: Participant) -> AsyncIterator[None]:
        third = await rig.start(rig.create(bystander.NAME))
        await rig.converged(survivor, third)
        cluster = CLUSTERS[rig.cluster_id]
        cluster.judge(third.node_id, MemberState.SUSPECT)
        yield
        cluster.judge(third.node_id, MemberState.ALIVE)
        await rig.converged(survivor, third)
