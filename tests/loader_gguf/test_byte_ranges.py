"""ranges.py against sets of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from swactor_loader_gguf.ranges import Ranges, cut, joined

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def integers(pairs):
    return {at for start, end in pairs for at in range(start, end)}


@given(pairs=PAIRS, start=st.integers(0, 60), end=st.integers(0, 60))
def test_a_set_of_ranges_is_a_set_of_integers(pairs, start, end):
    held, model = Ranges(pairs), integers(pairs)
    assert integers(held) == model
    assert held.nbytes == len(model)
    assert all(before[1] < after[0] for before, after in pairwise(held))
    assert integers(held.missing(start, end)) == set(range(start, end)) - model
    assert held.covers(start, end) == (set(range(start, end)) <= model)
    assert held.prefix() == next(at for at in range(62) if at not in model)


@given(pairs=PAIRS, gap=st.integers(0, 5), most=st.integers(1, 9))
def test_joining_and_cutting_lose_no_byte(pairs, gap, most):
    whole = joined(pairs, gap=gap)
    assert integers(pairs) <= integers(whole)
    assert all(after[0] - before[1] > gap for before, after in pairwise(whole))
    pieces = cut(whole, most=most)
    assert integers(pieces) == integers(whole)
    assert sum(end - start for start, end in pieces) == len(integers(whole))
    assert all(end - start <= most for start, end in pieces)
