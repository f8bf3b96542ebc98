"""side_by_side.py: results in order, one error, and nothing that stays open."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from swactor_loader_gguf import side_by_side as module
from swactor_loader_gguf.side_by_side import side_by_side


class Resource:
    def __init__(self):
        self.closed = threading.Event()


@pytest.mark.parametrize("most", [1, 3, 8])
def test_results_are_in_the_tasks_order_whichever_ends_first(most):
    later = threading.Event()

    def first():
        assert most == 1 or later.wait(60)
        return 0

    def last():
        later.set()
        return 2

    assert side_by_side([first, lambda: 1, last], most=most, give_back=pytest.fail) == [0, 1, 2]


def test_no_task_at_all():
    assert side_by_side([], most=8, give_back=pytest.fail) == []


def test_no_more_at_once_than_told():
    lock, running, seen = threading.Lock(), 0, 0
    pair = threading.Barrier(2)

    def task():
        nonlocal running, seen
        with lock:
            running += 1
            seen = max(seen, running)
        pair.wait(60)
        with lock:
            running -= 1

    side_by_side([task] * 8, most=2, give_back=pytest.fail)
    assert seen == 2


def test_after_an_error_nothing_is_begun_and_all_is_given_back():
    done, late = Resource(), Resource()
    reached, go_on = threading.Event(), threading.Event()

    def slow():
        reached.set()
        assert go_on.wait(60)
        return late

    def fails():
        assert reached.wait(60)
        raise LookupError("gone")

    begun = []
    with pytest.raises(LookupError, match="gone"):
        side_by_side(
            [lambda: done, slow, fails, lambda: begun.append(1)],
            most=2,
            give_back=lambda one: one.closed.set(),
        )
    assert done.closed.is_set()
    assert not begun
    assert not late.closed.is_set()
    go_on.set()  # a task that was under way, and that nobody waits for any more
    assert late.closed.wait(60)


def test_the_error_is_that_of_the_task_that_failed_whichever_is_told_of_first(monkeypatch):
    """A task that was not begun because of it may be done before it, and others still be under way."""

    class Inline:
        def __init__(self, most):
            pass

        def submit(self, function, task):
            future = Future()
            try:
                future.set_result(function(task))
            except LookupError as error:
                later.append((future, error))
            except BaseException as error:
                future.set_exception(error)
            return future

    later, other = [], Resource()
    monkeypatch.setattr(module, "UnwaitedThreads", Inline)

    def fails():
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        side_by_side([fails, lambda: other], most=2, give_back=pytest.fail)
    ((future, error),) = later
    assert not future.done()
    future.set_exception(error)
