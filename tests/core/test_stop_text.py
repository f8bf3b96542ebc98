"""stop_text.py: nothing is shown that belongs to a stop text, and nothing is held back needlessly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.errors import UsageError
from swactor_core.stop_text import StopText


def fed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool, str]:
    watch = StopText(stops)
    given_out = [watch.push(piece) for piece in pieces]
    return given_out, watch.stopped, watch.finish()


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["a E", "N", "D b"], (["a ", "", ""], True, "")),
        (["END"], ["a E", "N", "x"], (["a ", "", "ENx"], False, "")),
        (["END"], ["EN"], ([""], False, "EN")),
        (["aab"], ["a", "a", "a", "b"], (["", "", "a", ""], True, "")),
        (["\n\n"], ["x\n", "\n", "y"], (["x", "", ""], True, "")),
        (["abc", "b"], ["ab", "c"], (["a", ""], True, "")),
        (["b", "ab"], ["ab"], ([""], True, "")),
        (["é🎉"], ["é", "🎉"], (["", ""], True, "")),
        ([], ["a", "b"], (["a", "b"], False, "")),
    ],
)
def test_examples(stops: list[str], pieces: list[str], expected: tuple[list[str], bool, str]) -> None:
    assert fed(stops, pieces) == expected


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(stops=STOPS, text=st.text("abc", max_size=30), cuts=st.lists(st.integers(0, 30), max_size=10))
def test_where_the_pieces_are_cut_does_not_matter(stops: list[str], text: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    given_out, stopped, rest = fed(stops, [text[a:b] for a, b in pairwise(bounds)])
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert stopped is bool(found)
    assert "".join(given_out) + rest == (text[: min(found)[1]] if found else text)


@given(stops=STOPS, text=st.text("abc", max_size=20))
def test_nothing_is_shown_that_could_be_the_beginning_of_a_stop_and_nothing_else_is_held(
    stops: list[str], text: str
) -> None:
    watch, shown = StopText(stops), ""
    for count, character in enumerate(text, 1):
        shown += watch.push(character)
        if watch.stopped:
            break
        held = text[len(shown) : count]
        assert text[:count] == shown + held
        beginnings = [at for at in range(count) if any(stop.startswith(text[at:count]) for stop in stops)]
        assert len(shown) == min(beginnings, default=count)


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopText(["a", ""])
