"""Actors of one process: bounded mailboxes, one dispatcher, timers, tasks, supervision, ordered shutdown.

Messages are delivered in the order they were told, one at a time, from a single queue that one callback of
the loop drains at a time: an actor never runs inside another. A due timer becomes a message at the end of
that queue, so that input which arrived while the process was paused is handled before the timer is. Knows
asyncio and nothing of what the actors do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from swactor_core.errors import SwactorError
from swactor_core.messages import Address, TimerFired

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 256


class Actor(Protocol):
    def receive(self, message: object) -> None:
        """Handles one message; must not block. An exception goes to the system's supervisor."""


class ActorStopped(SwactorError):
    """The asked actor has stopped or never was; the question was not handled."""


class MailboxFull(SwactorError):
    """An actor does not keep up: its queue holds `capacity` messages. Reported to the supervisor."""


class _Timer:
    """One name's timer. `at` moves on without another wake-up of the loop: whoever watches progress moves its
    bound with every token."""

    __slots__ = ("at", "generation", "handle")

    def __init__(self, at: float, generation: int) -> None:
        self.at = at
        self.generation = generation
        self.handle: asyncio.TimerHandle


class _Mailbox:
    __slots__ = ("actor", "address", "capacity", "queued", "stopped", "timers")

    def __init__(self, address: Address, actor: Actor, capacity: int) -> None:
        self.address = address
        self.actor = actor
        self.capacity = capacity
        self.queued = 0
        self.stopped = False
        self.timers: dict[str, _Timer] = {}


class ActorSystem:
    """One process's actors. `on_failure(address, error)` is the supervisor: it hears of every exception and
    every overflow and decides (in swactor: fail-stop of the run, spec section 36)."""

    def __init__(self, on_failure: Callable[[Address, Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.now: Callable[[], float] = self._loop.time
        """Monotonic seconds, the `now` of every machine in this process."""
        self._on_failure = on_failure
        self._mailboxes: dict[Address, _Mailbox] = {}
        self._queue: deque[tuple[_Mailbox, object, asyncio.Future[Any] | None]] = deque()
        self._scheduled = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self.dead_letters: Counter[str] = Counter()

    def spawn(self, address: Address, actor: Actor, *, capacity: int = 4096) -> None:
        assert address not in self._mailboxes, f"{address} already lives"
        self._mailboxes[address] = _Mailbox(address, actor, capacity)

    def stop(self, address: Address) -> None:
        """Ends one actor: its timers are cancelled, what is queued for it becomes dead letters. A new actor
        under the same address gets none of it."""
        mailbox = self._mailboxes.pop(address, None)
        if mailbox is not None:
            mailbox.stopped = True
            for timer in mailbox.timers.values():
                timer.handle.cancel()

    def lives(self, address: Address) -> bool:
        return address in self._mailboxes

    def tell(self, address: Address, message: object) -> None:
        """Queues a message. To nobody: counted as a dead letter. To a full mailbox: the supervisor hears."""
        mailbox = self._mailboxes.get(address)
        if mailbox is None:
            self._dead(address, message, None)
        else:
            self._enqueue(mailbox, message)

    def deliver(self, address: Address, message: object) -> None:
        """As `tell`, and what is queued is delivered before this returns, not in the loop's next turn: for
        input that a callback of the loop has just read. While anything is being delivered, or waits for the
        turn that was asked for, it is a `tell`: the order stays, and no actor runs inside another."""
        if self._scheduled:
            self.tell(address, message)
            return
        self._scheduled = True
        self.tell(address, message)
        self._drain()

    def ask(self, address: Address, question: Callable[[Any], Any]) -> asyncio.Future[Any]:
        """Calls `question(actor)` in the actor's turn and gives its result; ActorStopped when it is gone."""
        future: asyncio.Future[Any] = self._loop.create_future()
        mailbox = self._mailboxes.get(address)
        if mailbox is None:
            self._dead(address, question, future)
        else:
            self._enqueue(mailbox, question, future)
        return future

    def _enqueue(self, mailbox: _Mailbox, message: object, future: asyncio.Future[Any] | None = None) -> None:
        if mailbox.queued >= mailbox.capacity:
            address = mailbox.address
            error = MailboxFull(
                f"mailbox of {address.component}:{address.key} holds {mailbox.capacity} messages"
            )
            if future is not None:
                future.set_exception(error)
            self._failed(address, error)
            return
        mailbox.queued += 1
        self._queue.append((mailbox, message, future))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _dead(self, address: Address, message: object, future: asyncio.Future[Any] | None) -> None:
        if future is not None:
            if not future.done():
                future.set_exception(ActorStopped(f"{address.component}:{address.key} has stopped"))
            return
        self.dead_letters[f"{address.component}:{type(message).__name__}"] += 1
        log.debug("dead letter for %s: %s", address, message)

    def _drain(self) -> None:
        queue = self._queue
        for _ in range(MESSAGES_PER_TURN):
            if not queue:
                self._scheduled = False
                return
            mailbox, message, future = queue.popleft()
            mailbox.queued -= 1
            if mailbox.stopped:
                self._dead(mailbox.address, message, future)
            elif future is not None:
                self._answer(mailbox, message, future)
            else:
                try:
                    mailbox.actor.receive(message)
                except Exception as error:
                    self._failed(mailbox.address, error)
        self._loop.call_soon(self._drain)

    def _answer(self, mailbox: _Mailbox, question: Any, future: asyncio.Future[Any]) -> None:
        if future.done():
            return
        try:
            future.set_result(question(mailbox.actor))
        except Exception as error:
            if not future.done():
                future.set_exception(error)
            self._failed(mailbox.address, error)

    def _failed(self, address: Address, error: Exception) -> None:
        try:
            self._on_failure(address, error)
        except Exception:  # the dispatcher outlives its supervisor: others still have to tear down
            log.exception("the supervisor failed on %s of %s:%d", error, address.component, address.key)

    def set_timer(self, address: Address, name: str, generation: int, *, at: float) -> None:
        mailbox = self._mailboxes.get(address)
        if mailbox is None:
            return
        earlier = mailbox.timers.get(name)
        if earlier is not None:
            if earlier.handle.when() <= at:
                earlier.at, earlier.generation = at, generation
                return
            earlier.handle.cancel()
        mailbox.timers[name] = timer = _Timer(at, generation)
        timer.handle = self._loop.call_at(at, self._wake, mailbox, name, timer)

    def _wake(self, mailbox: _Mailbox, name: str, timer: _Timer) -> None:
        if timer.handle.when() < timer.at:
            timer.handle = self._loop.call_at(timer.at, self._wake, mailbox, name, timer)
            return
        del mailbox.timers[name]
        self._loop.call_soon(self._due, mailbox, TimerFired(name, timer.generation))

    def _due(self, mailbox: _Mailbox, fired: TimerFired) -> None:
        if not mailbox.stopped:
            self._enqueue(mailbox, fired)

    def cancel_timer(self, address: Address, name: str) -> None:
        mailbox = self._mailboxes.get(address)
        timer = mailbox.timers.pop(name, None) if mailbox is not None else None
        if timer is not None:
            timer.handle.cancel()

    def start_task(self, work: Coroutine[Any, Any, None], *, owner: Address) -> asyncio.Task[None]:
        """Runs an effect that takes time. Its exception goes to the supervisor in the owner's name."""
        task = self._loop.create_task(work, name=f"{owner.component}:{owner.key}")
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if not done.cancelled():
                error = done.exception()
                if isinstance(error, Exception):
                    self._failed(owner, error)

        task.add_done_callback(ended)
        return task

    async def shutdown(self, *, timeout: float = 2.0) -> None:
        """Delivers what is queued, then stops actors in reverse order of their start and cancels tasks.

        Every unanswered `ask` gets ActorStopped. Bounded by `timeout` seconds for tasks to end.
        """
        if self._stopping:
            return
        self._stopping = True
        deadline = self._loop.time() + timeout
        while self._queue and self._loop.time() < deadline:  # noqa: ASYNC110 - the queue is this loop's own
            await asyncio.sleep(0)
        for address in reversed(tuple(self._mailboxes)):
            self.stop(address)
        while self._queue:
            mailbox, message, future = self._queue.popleft()
            self._dead(mailbox.address, message, future)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=max(0.1, deadline - self._loop.time()))
            for task in left:
                log.warning("a task of %s did not end within %g s", task.get_name(), timeout)
