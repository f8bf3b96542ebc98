"""Which claim stands: the precedence table, exhaustively, and how long suspicions last."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.ids import NodeId
from swactor_core.spi.membership import MemberState
from swactor_membership_swim.members import (
    PRECEDENCE,
    Relation,
    Suspicion,
    Verdict,
    judge,
    later_life,
    suspicion_length,
)
from swactor_membership_swim.settings import LAN, LOCAL

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT

# (held, claimed): does the claim stand at a lower, an equal, a higher incarnation? Written out a second time,
# from SWIM section 4.2 and the rules for departures, and compared with the table in use.
EXPECTED = {
    (ALIVE, ALIVE): (False, False, True),
    (ALIVE, SUSPECT): (False, True, True),
    (ALIVE, DEAD): (False, True, True),
    (ALIVE, LEFT): (True, True, True),
    (SUSPECT, ALIVE): (False, False, True),
    (SUSPECT, SUSPECT): (False, False, True),
    (SUSPECT, DEAD): (False, True, True),
    (SUSPECT, LEFT): (True, True, True),
    (DEAD, ALIVE): (False, False, True),
    (DEAD, SUSPECT): (False, False, True),
    (DEAD, DEAD): (False, False, True),
    (DEAD, LEFT): (True, True, True),
    (LEFT, ALIVE): (False, False, False),
    (LEFT, SUSPECT): (False, False, False),
    (LEFT, DEAD): (False, False, False),
    (LEFT, LEFT): (False, False, False),
}
CASES = [
    (held, claimed, relation, stands)
    for (held, claimed), row in EXPECTED.items()
    for relation, stands in zip(Relation, row, strict=True)
]


def test_the_table_is_total() -> None:
    assert set(PRECEDENCE) == set(product(MemberState, MemberState))
    assert len(CASES) == 48


@pytest.mark.parametrize(("held", "claimed", "relation", "stands"), CASES)
def test_every_pair_of_states_at_every_relation_of_incarnations(
    record, held, claimed, relation, stands
) -> None:
    member = record("a", incarnation=5, state=held)
    claim = replace(member, incarnation=5 + relation.value, state=claimed)
    verdict = judge(member, claim)
    assert (verdict is Verdict.CHANGES) == stands
    confirms = held is claimed is SUSPECT and relation is Relation.EQUAL
    assert (verdict is Verdict.CONFIRMS) == confirms
    assert stands or confirms or verdict is Verdict.STALE


@pytest.mark.parametrize(("held", "claimed"), list(product(MemberState, MemberState)))
def test_a_later_life_replaces_any_state_and_an_earlier_one_changes_nothing(record, held, claimed) -> None:
    member = record("a", epoch=5, incarnation=3, state=held)
    assert judge(member, replace(member, epoch=6, incarnation=0, state=claimed)) is Verdict.REPLACES_LIFE
    assert judge(member, replace(member, epoch=4, incarnation=9, state=claimed)) is Verdict.OLD_LIFE
    assert judge(None, member) is Verdict.NEW


def test_equal_epochs_of_two_nodes_are_settled_the_same_way_everywhere(record) -> None:
    one, other = record("a", epoch=5), replace(record("b", epoch=5), name="a")
    assert later_life(one, other) != later_life(other, one)
    assert judge(one, other) is (Verdict.REPLACES_LIFE if later_life(other, one) else Verdict.OLD_LIFE)


claims = st.lists(
    st.tuples(st.sampled_from(list(MemberState)), st.integers(0, 3), st.integers(1, 3)), max_size=12
)


@given(claims, st.randoms(use_true_random=False))
def test_observers_that_hear_the_same_claims_in_any_order_hold_the_same(record, heard, random) -> None:
    """The relation is a join: order does not matter, and neither does hearing twice."""

    def hold(sequence):
        held = None
        for state, incarnation, epoch in sequence:
            claim = record("a", epoch=epoch, incarnation=incarnation, state=state)
            if judge(held, claim) in (Verdict.NEW, Verdict.REPLACES_LIFE, Verdict.CHANGES):
                held = claim
        if held is None:
            return None
        # A departure stands at whatever incarnation it was heard.
        return held.epoch, held.state, None if held.state is LEFT else held.incarnation

    again = [*heard, *heard]
    random.shuffle(again)
    assert hold(heard) == hold(again)


@pytest.mark.parametrize("settings", [LAN, LOCAL])
def test_a_suspicion_shortens_with_confirmations_from_its_maximum_to_its_minimum(settings) -> None:
    lengths = [suspicion_length(settings, count, possible=7) for count in range(4)]
    assert lengths[0] == settings.suspicion_max
    assert settings.suspicion_min < lengths[1] < settings.suspicion_max
    assert lengths[2] == lengths[3] == pytest.approx(settings.suspicion_min)


def test_where_nobody_else_can_confirm_the_minimum_holds() -> None:
    assert suspicion_length(LOCAL, 0, possible=0) == LOCAL.suspicion_min
    assert suspicion_length(LOCAL, 1, possible=1) == LOCAL.suspicion_min
    assert suspicion_length(LOCAL, 0, possible=1) == LOCAL.suspicion_max


def test_the_first_accuser_is_no_confirmation_and_a_grant_holds_the_verdict_back(record) -> None:
    from swactor_membership_swim.members import Life

    suspicion = Suspicion(began=10.0)
    assert suspicion.deadline(LOCAL, possible=3) == 10.0 + LOCAL.suspicion_max
    suspicion.accusers.add(Life(NodeId(1), 1))
    assert suspicion.deadline(LOCAL, possible=3) == 10.0 + LOCAL.suspicion_max
    suspicion.accusers.add(Life(NodeId(2), 1))
    assert suspicion.deadline(LOCAL, possible=3) < 10.0 + LOCAL.suspicion_max
    suspicion.not_before = 20.0
    assert suspicion.deadline(LOCAL, possible=3) == 20.0
