"""The ring's protocol under weak memory: every execution that C11 allows for small rings, none too strict.

An explorer of views in the manner of the promising semantics without promises (Kang et al. 2017): a location
is a list of writes, a thread may load any write that is not older than its view, a release store carries the
thread's view along, an acquire load joins it, a read-modify-write takes the newest write and continues its
release sequence. A fence makes later relaxed stores carry what was known at it; two sequentially consistent
fences also share one global view. Payload accesses are plain: one that the other end's last access does not
happen before is a race. Where the producer closes the ring after its last record, word of that wakes the
consumer too; elsewhere hints are all that there is.

The protocol is that of ring.c without its hints at eighths, so that the rule "the ring was full as the
producer can have seen it" must carry the producer's wake-ups alone. Every memory order that ring.c states for
it is then weakened in turn, and every step order in turn exchanged: the explorer must find what goes wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import pytest

COMMIT, CONSUME, STATE, WAKE = 0, 1, 2, 3
CURSORS = 3  # locations that are lists of writes; `wake` is only ever the newest write
READABLE, WRITABLE = 1, 2


@dataclass(frozen=True)
class Orders:
    """Which of ring.c's memory orders are in force."""

    publish_commit: bool = True  # release store of commit
    observe_commit: bool = True  # acquire load of commit before payload is read
    publish_consume: bool = True  # release store of consume
    observe_consume: bool = True  # acquire load of consume before payload is written
    producer_fence: bool = True  # sequentially consistent; weakened: acquire and release only
    consumer_fence: bool = True
    clear_acquires: bool = True  # clearing a pending bit
    close_releases: bool = True  # the state word becomes CLOSED
    state_acquires: bool = True


@dataclass(frozen=True)
class Steps:
    """The order of steps that ring.c and its callers keep; each one broken loses a wake-up or bytes."""

    fence: bool = True  # there is one at all
    clear_before_load: bool = True  # a receiver acknowledges a hint before it loads cursors
    set_after_publish: bool = True  # a pending bit is set after the cursor that it announces
    look_after_publish: bool = True  # "was it full" is asked after consume is published
    state_before_cursor: bool = True  # CLOSED means that the commit loaded after it is the last


# What stands in ring.c for each of them; the model and the code must not drift apart.
FENCE = "\n  atomic_thread_fence(memory_order_seq_cst);"
SETS = "atomic_fetch_or_explicit(&ring->header->wake, "
STATE_CALL = "atomic_compare_exchange_weak_explicit(&ring->header->state, &expected, (uint32_t)state, "
IN_THE_CODE = {
    "publish_commit and producer_fence": "PUBLISH(ring->header->commit, commit);" + FENCE,
    "observe_commit": "uint64_t commit = ACQUIRE(ring->header->commit);\n  if (commit < ring->seen_commit",
    "publish_consume and consumer_fence": "PUBLISH(ring->header->consume, after);" + FENCE,
    "observe_consume": "uint64_t consume = ACQUIRE(ring->header->consume);\n  if (consume < ring->seen_",
    "readable is set": SETS + "READABLE_PENDING, memory_order_relaxed)",
    "writable is set": SETS + "WRITABLE_PENDING, memory_order_relaxed)",
    "was it full": "uint64_t commit = RELAXED(ring->header->commit);\n  int was_full",
    "clear_acquires": "atomic_fetch_and_explicit(&ring->header->wake, ~bit, memory_order_acquire)",
    "close_releases": STATE_CALL + "memory_order_release,",
    "state_acquires": "uint32_t state = ACQUIRE(ring->header->state);",
    "the header": "PUBLISH(header->magic, MAGIC);",
    "who opens it": "if (ACQUIRE(header->magic) != MAGIC)",
    "an onlooker": "uint64_t consume = ACQUIRE(ring->header->consume);\n    uint64_t commit = RELAXED(",
}

View = tuple[int, ...]  # newest known write of commit, consume and state, then of each slot: writes, reads
Writes = tuple[tuple[int, int, View], ...]  # (number, value, message view), oldest first


def join(left: View, right: View) -> View:
    return tuple(map(max, left, right))


def loads(writes: Writes, location: int, view: View, *, acquire: bool):
    """(value, view afterwards) of every write that this load may take."""
    for number, value, message in writes:
        if number >= view[location]:
            after = list(view)
            after[location] = number
            yield value, join(tuple(after), message) if acquire else tuple(after)


def store(writes: Writes, location: int, view: View, value: int, *, release: bool, fenced: View):
    """The location and the view afterwards. `fenced`: what the thread knew at its last fence."""
    number = writes[-1][0] + 1
    after = list(view)
    after[location] = number
    message = list(after if release else fenced)
    message[location] = number
    return (*writes, (number, value, tuple(message))), tuple(after)


@dataclass(frozen=True)
class End:
    """One thread: where it is, records done, what it knows, what it knew at its last fence."""

    where: str
    done: int
    view: View
    fenced: View
    loaded: int = 0  # a cursor or a state that it has loaded and not used yet


@dataclass(frozen=True)
class State:
    commit: Writes  # only writes that somebody can still load
    consume: Writes
    state: Writes
    wake: int
    wake_view: View
    fences: View
    touched: View  # payload accesses so far: per slot number of writes, number of reads
    hints: tuple[int, int]  # RingReadable, RingWritable under way
    word: View | None  # of the close, under way: a message, so it brings what its sender knew
    producer: End
    consumer: End


class Violation(Exception):
    pass


class Explorer:
    def __init__(self, capacity: int, records: int, *, closes: bool, **weakened: bool) -> None:
        """`weakened`: fields of Orders and Steps."""
        self.capacity, self.records, self.closes = capacity, records, closes
        self.orders = Orders(**{k: v for k, v in weakened.items() if hasattr(Orders, k)})
        self.steps = Steps(**{k: v for k, v in weakened.items() if hasattr(Steps, k)})
        self.zero: View = (0,) * (CURSORS + 2 * capacity)

    def explore(self) -> int:
        """Visits every reachable state; their number. Raises Violation at the first bad one."""
        fresh: Writes = ((0, 0, self.zero),)
        begin = End("load", 0, self.zero, self.zero)
        first = State(
            commit=fresh, consume=fresh, state=fresh,
            wake=0, wake_view=self.zero, fences=self.zero,
            touched=(0,) * (2 * self.capacity), hints=(0, 0), word=None,
            producer=begin, consumer=begin,
        )  # fmt: skip
        seen, stack = {first}, [first]
        while stack:
            now = stack.pop()
            following = [*self.produce(now), *self.consume(now)]
            if not following and not (now.producer.where == now.consumer.where == "done"):
                waiting = f"{now.producer.where} and {now.consumer.where} wait for ever"
                raise Violation(f"lost wake-up: {waiting} after {now.producer.done} and {now.consumer.done}")
            for other in map(self.forget, following):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return len(seen)

    def forget(self, now: State) -> State:
        """Drops writes that nobody can load any more."""
        views = now.producer.view, now.consumer.view

        def kept(writes: Writes, location: int) -> Writes:
            oldest = min(view[location] for view in views)
            return tuple(write for write in writes if write[0] >= oldest)

        return replace(
            now,
            commit=kept(now.commit, COMMIT),
            consume=kept(now.consume, CONSUME),
            state=kept(now.state, STATE),
        )

    def fence(self, now: State, end: End, sequential: bool) -> tuple[View, End]:
        if not self.steps.fence:
            return now.fences, end
        both = join(end.view, now.fences) if sequential else end.view
        return (both if sequential else now.fences), replace(end, view=both, fenced=both)

    def set_bit(self, now: State, end: End, bit: int):
        """Relaxed fetch-or: (wake, its message, whether a hint must be sent)."""
        return now.wake | bit, join(end.fenced, now.wake_view), not now.wake & bit

    def clear_bit(self, now: State, end: End, bit: int):
        """Fetch-and: (wake, its message, the view afterwards)."""
        after = join(end.view, now.wake_view) if self.orders.clear_acquires else end.view
        return now.wake & ~bit, join(end.fenced, now.wake_view), after

    def touch(self, now: State, end: End, kind: int):
        """A plain payload access; `kind` 0 writes, 1 reads. All conflicting accesses must be in view."""
        at = 2 * (end.done % self.capacity)
        conflicts = (at, at + 1) if kind == 0 else (at,)
        if any(end.view[CURSORS + index] != now.touched[index] for index in conflicts):
            raise Violation(f"race on the payload: {'overwritten while read' if kind == 0 else 'read early'}")
        touched, after = list(now.touched), list(end.view)
        touched[at + kind] += 1
        after[CURSORS + at + kind] += 1
        return tuple(touched), tuple(after)

    def produce(self, now: State):
        end, orders, steps = now.producer, self.orders, self.steps
        readable, writable = now.hints

        def to(where: str, **fields):
            return replace(end, where=where, **fields)

        def space(consume: int) -> str:
            return "wait" if end.done - consume == self.capacity else "write"

        if end.where in ("load", "load stale"):
            for consume, view in loads(now.consume, CONSUME, end.view, acquire=orders.observe_consume):
                where = space(consume) if end.where == "load" else "clear late"
                yield replace(now, producer=to(where, view=view, loaded=consume))
        elif end.where == "wait" and writable:
            where = "clear" if steps.clear_before_load else "load stale"
            yield replace(now, hints=(readable, writable - 1), producer=to(where))
        elif end.where in ("clear", "clear late"):
            wake, message, view = self.clear_bit(now, end, WRITABLE)
            where = "load" if end.where == "clear" else space(end.loaded)
            yield replace(now, wake=wake, wake_view=message, producer=to(where, view=view))
        elif end.where == "write":
            touched, view = self.touch(now, end, 0)
            where = "publish" if steps.set_after_publish else "set"
            yield replace(now, touched=touched, producer=to(where, view=view))
        elif end.where == "publish":
            release, value = orders.publish_commit, end.done + 1
            commit, view = store(now.commit, COMMIT, end.view, value, release=release, fenced=end.fenced)
            yield replace(now, commit=commit, producer=to("fence", view=view, done=value))
        elif end.where == "fence":
            fences, after = self.fence(now, end, orders.producer_fence)
            where = "set" if steps.set_after_publish else self.after_record(end)
            yield replace(now, fences=fences, producer=replace(after, where=where))
        elif end.where == "set":
            wake, message, hint = self.set_bit(now, end, READABLE)
            where = self.after_record(end) if steps.set_after_publish else "publish"
            hints = (readable + hint, writable)
            yield replace(now, wake=wake, wake_view=message, hints=hints, producer=to(where))
        elif end.where == "close":
            release = orders.close_releases
            state, view = store(now.state, STATE, end.view, 1, release=release, fenced=end.fenced)
            yield replace(now, state=state, word=view, producer=to("done", view=view))

    def after_record(self, end: End) -> str:
        if end.done < self.records:
            return "load"
        return "close" if self.closes else "done"

    def consume(self, now: State):
        end, orders, steps = now.consumer, self.orders, self.steps
        readable, writable = now.hints

        def to(where: str, **fields):
            return replace(end, where=where, **fields)

        def of_state(view: View):
            return loads(now.state, STATE, view, acquire=orders.state_acquires)

        def of_commit(view: View, acquire: bool):
            return loads(now.commit, COMMIT, view, acquire=acquire)

        def next_of(commit: int, closed: int) -> str:
            if commit > end.done:
                return "read"
            if not self.closes and end.done == self.records:
                return "done"
            if not closed:
                return "wait"
            if end.done != self.records:
                raise Violation(f"truncated: closed is seen after {end.done} records")
            return "done"

        if end.where == "load":
            if steps.state_before_cursor:
                for closed, view in of_state(end.view):
                    yield replace(now, consumer=to("load commit", view=view, loaded=closed))
            else:
                for commit, view in of_commit(end.view, orders.observe_commit):
                    yield replace(now, consumer=to("load state", view=view, loaded=commit))
        elif end.where == "load commit":
            for commit, view in of_commit(end.view, orders.observe_commit):
                yield replace(now, consumer=to(next_of(commit, end.loaded), view=view))
        elif end.where == "load state":
            for closed, view in of_state(end.view):
                yield replace(now, consumer=to(next_of(end.loaded, closed), view=view))
        elif end.where == "load stale":
            for commit, view in of_commit(end.view, orders.observe_commit):
                yield replace(now, consumer=to("clear late", view=view, loaded=commit))
        elif end.where == "wait":
            where = "clear" if steps.clear_before_load else "load stale"
            if readable:
                yield replace(now, hints=(readable - 1, writable), consumer=to(where))
            if now.word is not None:
                yield replace(now, word=None, consumer=to(where, view=join(end.view, now.word)))
        elif end.where in ("clear", "clear late"):
            wake, message, view = self.clear_bit(now, end, READABLE)
            where = "load" if end.where == "clear" else next_of(end.loaded, 0)
            yield replace(now, wake=wake, wake_view=message, consumer=to(where, view=view))
        elif end.where == "read":
            touched, view = self.touch(now, end, 1)
            where = "publish" if steps.look_after_publish else "look"
            yield replace(now, touched=touched, consumer=to(where, view=view))
        elif end.where == "publish":
            release, value = orders.publish_consume, end.done + 1
            consume, view = store(now.consume, CONSUME, end.view, value, release=release, fenced=end.fenced)
            yield replace(now, consume=consume, consumer=to("fence", view=view, done=value))
        elif end.where == "fence":
            fences, after = self.fence(now, end, orders.consumer_fence)
            where = "look" if steps.look_after_publish else ("set" if end.loaded else "load")
            yield replace(now, fences=fences, consumer=replace(after, where=where))
        elif end.where == "look":
            before = end.done - steps.look_after_publish
            for commit, view in of_commit(end.view, False):
                full = commit - before >= self.capacity
                where = ("set" if full else "load") if steps.look_after_publish else "publish"
                yield replace(now, consumer=to(where, view=view, loaded=int(full)))
        elif end.where == "set":
            wake, message, hint = self.set_bit(now, end, WRITABLE)
            hints = (readable, writable + hint)
            yield replace(now, wake=wake, wake_view=message, hints=hints, consumer=to("load"))


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize(("capacity", "records"), [(1, 2), (1, 4), (2, 4), (3, 5)])
def test_no_race_no_lost_wake_up_and_nothing_truncated(capacity, records, closes) -> None:
    assert Explorer(capacity, records, closes=closes).explore() > 100


@pytest.mark.long
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_longer_runs_are_as_good(capacity, closes) -> None:
    assert Explorer(capacity, 7, closes=closes).explore() > 1000


@pytest.mark.parametrize(
    ("order", "finding"),
    [
        ("publish_commit", "read early"),
        ("observe_commit", "read early"),
        ("publish_consume", "overwritten while read"),
        ("observe_consume", "overwritten while read"),
        ("producer_fence", "lost wake-up"),
        ("consumer_fence", "lost wake-up"),
        ("clear_acquires", "lost wake-up"),
        ("state_acquires", "truncated"),
    ],
)
def test_every_order_is_needed(order, finding) -> None:
    with pytest.raises(Violation, match=finding):
        Explorer(2, 4, closes=finding == "truncated", **{order: False}).explore()


@pytest.mark.parametrize("releases", [True, False])
def test_closing_does_not_lean_on_the_fence_of_the_last_commit(releases) -> None:
    """The one order that the fence would spare; the ring has room for all, so the fence has no other use."""
    explorer = Explorer(4, 3, closes=True, fence=False, close_releases=releases)
    if releases:
        assert explorer.explore() > 100
    else:
        with pytest.raises(Violation, match="truncated"):
            explorer.explore()


@pytest.mark.parametrize(
    ("step", "finding"),
    [
        ("fence", "lost wake-up"),
        ("clear_before_load", "lost wake-up"),
        ("set_after_publish", "lost wake-up"),
        ("look_after_publish", "lost wake-up"),
        ("state_before_cursor", "truncated"),
    ],
)
def test_every_order_of_steps_is_needed_even_when_memory_is_strong(step, finding) -> None:
    with pytest.raises(Violation, match=finding):
        Explorer(2, 4, closes=finding == "truncated", **{step: False}).explore()


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("acquire", [True, False])
def test_who_sees_the_magic_number_sees_the_whole_header(release, acquire) -> None:
    """A fresh range: the header's fields, here `commit`, and then `magic`, here `state`."""
    zero: View = (0,) * CURSORS
    fresh: Writes = ((0, 0, zero),)
    fields, view = store(fresh, COMMIT, zero, 1, release=False, fenced=zero)
    magic, _ = store(fresh, STATE, view, 1, release=release, fenced=zero)
    seen = {
        (present, field)
        for present, view in loads(magic, STATE, zero, acquire=acquire)
        for field, _ in loads(fields, COMMIT, view, acquire=False)
    }
    assert ((1, 0) in seen) == (not (release and acquire))


@pytest.mark.parametrize("acquire", [True, False])
def test_an_onlooker_never_sees_consume_ahead_of_commit(acquire) -> None:
    """It loads consume, then commit; the consumer has published one record that it acquired."""
    zero: View = (0,) * CURSORS
    fresh: Writes = ((0, 0, zero),)
    commit, _ = store(fresh, COMMIT, zero, 1, release=True, fenced=zero)
    (view,) = (view for value, view in loads(commit, COMMIT, zero, acquire=True) if value)
    consume, _ = store(fresh, CONSUME, view, 1, release=True, fenced=zero)
    pairs = {
        (taken, made)
        for taken, view in loads(consume, CONSUME, zero, acquire=acquire)
        for made, _ in loads(commit, COMMIT, view, acquire=False)
    }
    assert ((1, 0) in pairs) == (not acquire)


def test_the_code_states_the_orders_of_the_model_and_no_other() -> None:
    source = (Path(str(resources.files("swactor_arena"))) / "_csrc" / "ring.c").read_text()
    for order, text in IN_THE_CODE.items():
        assert source.count(text) == 1, order
    modelled = "".join(IN_THE_CODE.values())
    for strong in (
        r"ACQUIRE\((?!field)",
        r"PUBLISH\((?!field)",
        r"atomic_thread_fence\(",
        r"atomic_fetch_\w+\(",
    ):
        assert len(re.findall(strong, source)) == len(re.findall(strong, modelled)), strong
    assert not re.search(r"memory_order_(acq_rel|consume)", source)
