"""The memberships of this repository keep the membership contract."""

from __future__ import annotations

import pytest
from swactor_core.spi.membership import MembershipPlugin, MemberState
from swactor_testing.conformance import MembershipCapabilities, MembershipContract
from swactor_testing.conformance.membership import MembershipRig, Participant
from swactor_testing.static import CLUSTERS, StaticPlugin


class TestStatic(MembershipContract):
    """Nobody is probed: the verdict of a death is the script's, as in every run with this mock."""

    capabilities = MembershipCapabilities(provider="static", crosses_processes=False, sealed=False)

    @pytest.fixture
    def plugin(self) -> MembershipPlugin:
        return StaticPlugin()

    async def kill(self, rig: MembershipRig, participant: Participant) -> None:
        await super().kill(rig, participant)
        CLUSTERS[rig.cluster_id].judge(participant.node_id, MemberState.DEAD)


class TestSwim(MembershipContract):
    capabilities = MembershipCapabilities(provider="swim", settings={"profile": "local"})

    @pytest.fixture
    def plugin(self) -> MembershipPlugin:
        from swactor_membership_swim.driver import SwimMembership

        class Plugin:
            create = staticmethod(SwimMembership)

        return Plugin()
