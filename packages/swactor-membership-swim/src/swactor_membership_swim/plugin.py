"""Hook implementations of this plug-in. The protocol is imported when a membership is asked for."""

from __future__ import annotations

from swactor_core.hookspecs import hookimpl
from swactor_core.spi.membership import Membership, MembershipContext, MembershipPlugin
from swactor_core.spi.provider import Kind, Provider


class _Swim:
    def create(self, context: MembershipContext) -> Membership:
        from swactor_membership_swim.driver import SwimMembership

        return SwimMembership(context)


def _swim() -> MembershipPlugin:
    return _Swim()


@hookimpl
def swactor_register_memberships() -> list[Provider]:
    """SWIM over sealed datagrams; profiles `local` and `lan` by the setting `profile`."""
    return [
        Provider(
            Kind.MEMBERSHIP,
            "swim",
            "SWIM with Lifeguard over sealed datagrams, profiles local and lan",
            _swim,
            capabilities={"sealed": True, "leave": True, "udp": True},
        )
    ]
