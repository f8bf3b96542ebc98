"""The memberships of this repository keep the membership contract."""

from __future__ import annotations

import pytest
from static_script import Scripted
from swactor_core.spi.membership import MembershipPlugin
from swactor_testing.conformance import MembershipCapabilities, MembershipContract
from swactor_testing.static import StaticPlugin

SETTINGS = {"profile": "local", "suspicion_min": 1.2, "suspicion_max": 1.6}
"""More patient than the profile: this machine may be busy while a participant is stopped on purpose."""


class TestStatic(Scripted):
    __test__ = True
    capabilities = MembershipCapabilities(
        provider="static", crosses_processes=False, sealed=False, survives=0.055
    )

    @pytest.fixture
    def plugin(self) -> MembershipPlugin:
        return StaticPlugin()


class TestSwim(MembershipContract):
    capabilities = MembershipCapabilities(provider="swim", settings=SETTINGS, survives=0.5)

    @pytest.fixture
    def plugin(self) -> MembershipPlugin:
        from swactor_membership_swim.driver import SwimMembership

        class Plugin:
            create = staticmethod(SwimMembership)

        return Plugin()
