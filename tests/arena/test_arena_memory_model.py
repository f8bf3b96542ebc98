"""The ring's protocol under weak memory: every execution that C11 allows for small rings, none too strict.

An explorer of views in the manner of the promising semantics without promises (Kang et al. 2017): a location
is a list of writes, a thread may load any write that is not older than its view, a release store carries the
thread's view along, an acquire load joins it, a read-modify-write takes the newest write and continues its
release sequence, and sequentially consistent fences share one global view. Payload accesses are plain: one
that the other end's last access does not happen before is a race.

The protocol is that of ring.c without its hints at eighths, so that the rule "the ring was full as the
producer can have seen it" must carry the producer's wake-ups alone. Every memory order that ring.c states for
it is then weakened in turn, and the explorer must find the race or the lost wake-up that results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import pytest

COMMIT, CONSUME = 0, 1
READABLE, WRITABLE = 1, 2


@dataclass(frozen=True)
class Orders:
    """Which of ring.c's orders are in force."""

    publish_commit: bool = True  # release store of commit
    observe_commit: bool = True  # acquire load of commit before payload is read
    publish_consume: bool = True  # release store of consume
    observe_consume: bool = True  # acquire load of consume before payload is written
    producer_fence: bool = True
    consumer_fence: bool = True
    set_releases: bool = True  # setting a pending bit
    clear_acquires: bool = True  # clearing a pending bit


# What stands in ring.c for each of them; the model and the code must not drift apart.
IN_THE_CODE = {
    "publish_commit": "PUBLISH(ring->header->commit, commit);\n  atomic_thread_fence(memory_order_seq_cst);",
    "observe_commit": "uint64_t commit = ACQUIRE(ring->header->commit);\n  if (commit < ring->seen_commit",
    "publish_consume": "PUBLISH(ring->header->consume, after);\n  atomic_thread_fence(memory_order_seq_cst);",
    "observe_consume": "uint64_t consume = ACQUIRE(ring->header->consume);\n  if (consume < ring->seen_",
    "set_releases": "atomic_fetch_or_explicit(&ring->header->wake, WRITABLE_PENDING, memory_order_acq_rel)",
    "clear_acquires": "atomic_fetch_and_explicit(&ring->header->wake, ~bit, memory_order_acq_rel)",
}

View = tuple[int, ...]  # newest known write of commit, of consume, then of each slot: writes, reads


def join(left: View, right: View) -> View:
    return tuple(map(max, left, right))


@dataclass(frozen=True)
class State:
    """`commit` and `consume` are (number, value, message view) triples still visible to somebody."""

    commit: tuple[tuple[int, int, View], ...]
    consume: tuple[tuple[int, int, View], ...]
    wake: int
    wake_view: View
    fences: View
    written: View  # payload accesses so far: per slot number of writes, number of reads
    hints: tuple[int, int]  # RingReadable, RingWritable under way
    producer: tuple[str, int, View]  # where, records done, view
    consumer: tuple[str, int, View]


class Violation(Exception):
    pass


class Explorer:
    def __init__(self, capacity: int, records: int, orders: Orders) -> None:
        self.capacity, self.records, self.orders = capacity, records, orders
        self.zero: View = (0,) * (2 + 2 * capacity)

    def explore(self) -> int:
        """Visits every reachable state; their number. Raises Violation at the first bad one."""
        first = State(
            commit=((0, 0, self.zero),),
            consume=((0, 0, self.zero),),
            wake=0,
            wake_view=self.zero,
            fences=self.zero,
            written=(0,) * (2 * self.capacity),
            hints=(0, 0),
            producer=("load", 0, self.zero),
            consumer=("load", 0, self.zero),
        )
        seen, stack = {first}, [first]
        while stack:
            state = stack.pop()
            following = [*self.produce(state), *self.consume(state)]
            if not following and not (state.producer[0] == state.consumer[0] == "done"):
                raise Violation(f"lost wake-up: {state.producer[:2]} and {state.consumer[:2]} wait for ever")
            for other in map(self.forget, following):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return len(seen)

    def forget(self, state: State) -> State:
        """Drops writes that nobody can load any more."""
        views = state.producer[2], state.consumer[2]
        commit = tuple(w for w in state.commit if w[0] >= min(v[COMMIT] for v in views))
        consume = tuple(w for w in state.consume if w[0] >= min(v[CONSUME] for v in views))
        return replace(state, commit=commit, consume=consume)

    def loads(self, writes, location, view, acquire):
        """(value, view afterwards) of every write that this load may take."""
        for number, value, message in writes:
            if number >= view[location]:
                after = list(view)
                after[location] = number
                yield value, join(tuple(after), message) if acquire else tuple(after)

    def store(self, writes, location, view, value, release):
        number = writes[-1][0] + 1
        after = list(view)
        after[location] = number
        message = tuple(after) if release else tuple(number if i == location else 0 for i in range(len(view)))
        return (*writes, (number, value, message)), tuple(after)

    def fence(self, state, view, active):
        if not active:
            return state.fences, view
        both = join(view, state.fences)
        return both, both

    def set_bit(self, state, view, bit):
        """Fetch-or: (wake, its message, view, whether a hint must be sent)."""
        known = join(view, state.wake_view)
        message = join(known, state.wake_view) if self.orders.set_releases else state.wake_view
        return state.wake | bit, message, known, not state.wake & bit

    def clear_bit(self, state, view, bit):
        known = join(view, state.wake_view) if self.orders.clear_acquires else view
        return state.wake & ~bit, join(known, state.wake_view), known

    def touch(self, state, view, slot, kind):
        """A plain payload access; `kind` 0 writes, 1 reads. All conflicting accesses must be in view."""
        at = 2 * slot
        conflicts = (at, at + 1) if kind == 0 else (at,)
        for index in conflicts:
            if view[2 + index] != state.written[index]:
                raise Violation(
                    "race on the payload: " + ("overwritten while read" if kind == 0 else "read early")
                )
        written, after = list(state.written), list(view)
        written[at + kind] += 1
        after[2 + at + kind] += 1
        return tuple(written), tuple(after)

    def produce(self, state):
        where, done, view = state.producer
        readable, writable = state.hints
        if where == "load":
            for consume, after in self.loads(state.consume, CONSUME, view, self.orders.observe_consume):
                full = done - consume == self.capacity
                yield replace(state, producer=("wait" if full else "write", done, after))
        elif where == "wait" and writable:
            yield replace(state, hints=(readable, writable - 1), producer=("acknowledge", done, view))
        elif where == "acknowledge":
            wake, message, after = self.clear_bit(state, view, WRITABLE)
            yield replace(state, wake=wake, wake_view=message, producer=("load", done, after))
        elif where == "write":
            written, after = self.touch(state, view, done % self.capacity, 0)
            yield replace(state, written=written, producer=("publish", done, after))
        elif where == "publish":
            commit, after = self.store(state.commit, COMMIT, view, done + 1, self.orders.publish_commit)
            yield replace(state, commit=commit, producer=("fence", done + 1, after))
        elif where == "fence":
            fences, after = self.fence(state, view, self.orders.producer_fence)
            yield replace(state, fences=fences, producer=("set", done, after))
        elif where == "set":
            wake, message, after, hint = self.set_bit(state, view, READABLE)
            then = "done" if done == self.records else "load"
            yield replace(
                state,
                wake=wake,
                wake_view=message,
                hints=(readable + hint, writable),
                producer=(then, done, after),
            )

    def consume(self, state):
        where, done, view = state.consumer
        readable, writable = state.hints
        if where == "load":
            for commit, after in self.loads(state.commit, COMMIT, view, self.orders.observe_commit):
                yield replace(state, consumer=("wait" if commit == done else "read", done, after))
        elif where == "wait" and readable:
            yield replace(state, hints=(readable - 1, writable), consumer=("acknowledge", done, view))
        elif where == "acknowledge":
            wake, message, after = self.clear_bit(state, view, READABLE)
            yield replace(state, wake=wake, wake_view=message, consumer=("load", done, after))
        elif where == "read":
            written, after = self.touch(state, view, done % self.capacity, 1)
            yield replace(state, written=written, consumer=("publish", done, after))
        elif where == "publish":
            consume, after = self.store(state.consume, CONSUME, view, done + 1, self.orders.publish_consume)
            yield replace(state, consume=consume, consumer=("fence", done + 1, after))
        elif where == "fence":
            fences, after = self.fence(state, view, self.orders.consumer_fence)
            yield replace(state, fences=fences, consumer=("look", done, after))
        elif where == "look":
            then = "done" if done == self.records else "load"
            for commit, after in self.loads(state.commit, COMMIT, view, self.orders.observe_commit):
                was_full = commit - (done - 1) >= self.capacity
                yield replace(state, consumer=("set" if was_full else then, done, after))
        elif where == "set":
            wake, message, after, hint = self.set_bit(state, view, WRITABLE)
            then = "done" if done == self.records else "load"
            yield replace(
                state,
                wake=wake,
                wake_view=message,
                hints=(readable, writable + hint),
                consumer=(then, done, after),
            )


@pytest.mark.parametrize(("capacity", "records"), [(1, 2), (1, 4), (2, 4), (3, 5)])
def test_no_race_and_no_lost_wake_up_in_any_execution(capacity, records) -> None:
    assert Explorer(capacity, records, Orders()).explore() > 100


@pytest.mark.parametrize(
    ("order", "finding"),
    [
        ("publish_commit", "read early"),
        ("observe_commit", "read early"),
        ("publish_consume", "overwritten while read"),
        ("observe_consume", "overwritten while read"),
        ("producer_fence", "lost wake-up"),
        ("consumer_fence", "lost wake-up"),
        ("set_releases", "lost wake-up"),
        ("clear_acquires", "lost wake-up"),
    ],
)
def test_every_order_is_needed(order, finding) -> None:
    weakened = replace(Orders(), **{order: False})
    with pytest.raises(Violation, match=finding):
        Explorer(2, 4, weakened).explore()


def test_the_code_states_the_orders_of_the_model() -> None:
    source = (Path(str(resources.files("swactor_arena"))) / "_csrc" / "ring.c").read_text()
    for order, text in IN_THE_CODE.items():
        assert text in source, order
