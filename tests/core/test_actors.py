"""The actor runtime: order, bounded mailboxes, supervision, timers behind input, tasks, ordered shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from swactor_core.actors import ActorStopped, ActorSystem, MachineActor, MailboxFull
from swactor_core.events import EventName
from swactor_core.faults import Component
from swactor_core.fsm import CancelTimer, Effect, Emit, InvalidTransition, Machine, Outcome, Row, Send
from swactor_core.ids import NodeId
from swactor_core.messages import Address, TimerFired
from swactor_core.observe.bus import EventBus

A, B = Address(Component.TX_EDGE, 1), Address(Component.RX_EDGE, 2)


class Recorder:
    """Keeps what it receives; a callable message is called instead."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def receive(self, message: Any) -> None:
        if callable(message):
            message()
        else:
            self.received.append(message)


class Failures(list[tuple[Address, Exception]]):
    """A supervisor that remembers."""

    def __call__(self, address: Address, error: Exception) -> None:
        self.append((address, error))


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
async def system(failures: Failures) -> ActorSystem:
    return ActorSystem(failures)


def spawn(system: ActorSystem, address: Address = A, **options: Any) -> Recorder:
    actor = Recorder()
    system.spawn(address, actor, **options)
    return actor


async def settled(system: ActorSystem, address: Address = A) -> None:
    """Everything that was told before this has been handled."""
    await system.ask(address, lambda actor: None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - an actor's state has no event to wait for
            await asyncio.sleep(0)


# --- messages ---


async def test_messages_come_in_the_order_in_which_they_were_told_over_all_actors(
    system: ActorSystem,
) -> None:
    order: list[int] = []
    spawn(system, A)
    spawn(system, B)
    for number in range(600):  # more than one turn of the dispatcher
        system.tell(A if number % 3 else B, lambda number=number: order.append(number))
    await settled(system)
    assert order == list(range(600))


async def test_an_actor_never_runs_inside_another(system: ActorSystem) -> None:
    order: list[str] = []
    spawn(system, A)
    spawn(system, B)

    def outer() -> None:
        order.append("begins")
        system.tell(B, lambda: order.append("inner"))
        order.append("ends")

    system.tell(A, outer)
    assert order == []
    await settled(system, B)
    await settled(system, B)
    assert order == ["begins", "ends", "inner"]


async def test_what_is_delivered_is_handled_at_once_with_all_that_follows_from_it(
    system: ActorSystem,
) -> None:
    order: list[str] = []
    spawn(system, A)
    spawn(system, B)

    def outer() -> None:
        order.append("begins")
        system.deliver(B, lambda: order.append("inner"))  # from inside an actor it is a tell
        order.append("ends")

    system.deliver(A, outer)
    assert order == ["begins", "ends", "inner"]
    await asyncio.sleep(0)
    system.deliver(A, lambda: order.append("again"))
    assert order[3:] == ["again"]


async def test_what_is_delivered_does_not_overtake_what_was_told(system: ActorSystem) -> None:
    order: list[str] = []
    spawn(system, A)
    spawn(system, B)
    system.tell(A, lambda: order.append("told"))
    system.deliver(B, lambda: order.append("delivered"))
    assert order == []
    await settled(system)
    assert order == ["told", "delivered"]


async def test_a_delivery_that_does_not_rest_lets_the_loop_turn(system: ActorSystem) -> None:
    spawn(system)
    told = 0

    def again() -> None:
        nonlocal told
        told += 1
        system.tell(A, again)

    system.deliver(A, again)
    once = told
    await asyncio.sleep(0)
    assert 0 < once < told
    system.stop(A)


async def test_a_failure_in_what_is_delivered_is_supervised_and_not_raised(
    system: ActorSystem, failures: Failures
) -> None:
    spawn(system)

    def fails() -> None:
        raise ValueError("no")

    system.deliver(A, fails)
    assert [str(error) for _, error in failures] == ["no"]
    system.deliver(B, "nobody")
    assert system.dead_letters == {"RxEdge:str": 1}


async def test_a_storm_of_self_told_messages_does_not_starve_the_loop(system: ActorSystem) -> None:
    spawn(system)
    told = 0

    def again() -> None:
        nonlocal told
        told += 1
        system.tell(A, again)

    system.tell(A, again)
    for _ in range(5):
        await asyncio.sleep(0)
    assert told > 0
    system.stop(A)


async def test_nobody_is_told_and_it_is_counted(system: ActorSystem) -> None:
    system.tell(A, "hello")
    system.tell(A, "again")
    system.tell(B, 1)
    assert system.dead_letters == {"TxEdge:str": 2, "RxEdge:int": 1}


async def test_a_full_mailbox_is_reported_and_keeps_what_it_holds(
    system: ActorSystem, failures: Failures
) -> None:
    actor = spawn(system, capacity=2)
    for number in range(3):
        system.tell(A, number)
    refused = system.ask(A, lambda actor: None)
    assert [(address, type(error)) for address, error in failures] == [(A, MailboxFull)] * 2
    assert "TxEdge:1 holds 2 messages" in str(failures[0][1])
    with pytest.raises(MailboxFull):
        await refused
    await until(lambda: actor.received == [0, 1])
    system.tell(A, 3)  # there is room again
    await settled(system)
    assert actor.received == [0, 1, 3]


async def test_two_actors_under_one_address_are_a_defect(system: ActorSystem) -> None:
    spawn(system)
    with pytest.raises(AssertionError, match="already lives"):
        spawn(system)


async def test_a_stopped_actor_gets_nothing_and_neither_does_its_successor(system: ActorSystem) -> None:
    first = spawn(system)
    system.tell(A, "for the first")
    system.set_timer(A, "bound", 1, at=system.now())
    question = system.ask(A, lambda actor: actor)
    system.stop(A)
    second = spawn(system)
    system.tell(A, "for the second")
    with pytest.raises(ActorStopped, match="TxEdge:1 has stopped"):
        await question
    await settled(system)
    await settled(system)
    assert (first.received, second.received) == ([], ["for the second"])
    assert system.dead_letters == {"TxEdge:str": 1}
    assert system.lives(A)


async def test_a_timer_that_is_already_due_does_not_reach_the_successor(system: ActorSystem) -> None:
    spawn(system)
    system.set_timer(A, "bound", 1, at=system.now())
    due = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_at(system.now(), due.set_result, None)
    await due  # the timer has fired and waits for its place in the queue
    system.stop(A)
    successor = spawn(system)
    await settled(system)
    await settled(system)
    assert successor.received == []


# --- asking ---


async def test_a_question_is_answered_in_the_actor_s_turn(system: ActorSystem) -> None:
    actor = spawn(system)
    system.tell(A, "before")
    answer = system.ask(A, lambda asked: list(asked.received))
    system.tell(A, "after")
    assert await answer == ["before"]
    await settled(system)
    assert actor.received == ["before", "after"]


async def test_a_question_that_raises_is_raised_and_supervised(
    system: ActorSystem, failures: Failures
) -> None:
    spawn(system)
    with pytest.raises(ZeroDivisionError):
        await system.ask(A, lambda actor: 1 / 0)
    assert [(address, type(error)) for address, error in failures] == [(A, ZeroDivisionError)]


async def test_a_question_to_nobody_or_that_nobody_awaits_any_more(system: ActorSystem) -> None:
    with pytest.raises(ActorStopped):
        await system.ask(A, lambda actor: None)
    spawn(system)
    asked: list[object] = []
    question = system.ask(A, asked.append)
    question.cancel()
    await settled(system)
    assert asked == []


# --- supervision ---


async def test_an_exception_goes_to_the_supervisor_and_the_actor_lives_on(
    system: ActorSystem, failures: Failures
) -> None:
    actor = spawn(system)
    system.tell(A, lambda: 1 / 0)
    system.tell(A, "next")
    await settled(system)
    assert [(address, type(error)) for address, error in failures] == [(A, ZeroDivisionError)]
    assert actor.received == ["next"]


async def test_a_supervisor_that_fails_does_not_stop_the_dispatcher(caplog: pytest.LogCaptureFixture) -> None:
    def supervisor(address: Address, error: Exception) -> None:
        raise RuntimeError("cannot cope")

    system = ActorSystem(supervisor)
    actor = spawn(system)
    with caplog.at_level(logging.ERROR):
        system.tell(A, lambda: 1 / 0)
        system.tell(A, "next")
        await settled(system)
    assert actor.received == ["next"]
    assert "the supervisor failed on division by zero of TxEdge:1" in caplog.text


# --- timers ---


async def test_a_timer_becomes_a_message(system: ActorSystem) -> None:
    actor = spawn(system)
    system.set_timer(A, "bound", 3, at=system.now() + 0.001)
    await until(lambda: bool(actor.received))
    assert actor.received == [TimerFired("bound", 3)]


async def test_a_timer_of_the_same_name_replaces_and_a_cancelled_one_is_silent(system: ActorSystem) -> None:
    actor = spawn(system)
    at = system.now() + 0.001
    system.set_timer(A, "bound", 1, at=at)
    system.set_timer(A, "bound", 2, at=at)
    system.set_timer(A, "other", 3, at=at)
    system.cancel_timer(A, "other")
    system.cancel_timer(A, "never set")
    system.cancel_timer(B, "nobody")
    system.set_timer(B, "nobody", 1, at=at)
    system.set_timer(A, "last", 4, at=at + 0.001)
    await until(lambda: TimerFired("last", 4) in actor.received)
    assert actor.received == [TimerFired("bound", 2), TimerFired("last", 4)]


async def test_a_timer_moves_either_way_and_fires_once_at_its_last_time(system: ActorSystem) -> None:
    actor = spawn(system)
    loop = asyncio.get_running_loop()
    began = system.now()
    system.set_timer(A, "later", 1, at=began + 0.001)
    handles = len(loop._scheduled)
    for generation in range(2, 200):
        system.set_timer(A, "later", generation, at=began + 0.03)
    assert len(loop._scheduled) == handles, "a timer that moves on costs the loop nothing"
    system.set_timer(A, "sooner", 200, at=began + 60)
    system.set_timer(A, "sooner", 201, at=began + 0.005)
    await until(lambda: len(actor.received) == 2)
    assert system.now() - began >= 0.03
    assert actor.received == [TimerFired("sooner", 201), TimerFired("later", 199)]
    system.set_timer(A, "moved", 202, at=began)
    system.set_timer(A, "moved", 203, at=began + 60)
    system.stop(A)


async def test_after_a_pause_input_that_waited_is_handled_before_the_timer_that_is_due(
    system: ActorSystem,
) -> None:
    actor = spawn(system)
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        loop.add_reader(ours, lambda: system.tell(A, ours.recv(16)))
        at = system.now() + 0.001
        system.set_timer(A, "bound", 1, at=at)
        theirs.send(b"alive")
        while system.now() <= at:  # the process is paused: nothing of the loop runs
            pass
        await until(lambda: len(actor.received) == 2)
        loop.remove_reader(ours)
    assert actor.received == [b"alive", TimerFired("bound", 1)]


# --- tasks ---


async def test_a_task_s_exception_goes_to_the_supervisor_in_the_owner_s_name(
    system: ActorSystem, failures: Failures
) -> None:
    async def effect() -> None:
        raise OSError("no such peer")

    task = system.start_task(effect(), owner=B)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [(address, str(error)) for address, error in failures] == [(B, "no such peer")]


async def test_a_cancelled_task_is_no_failure(system: ActorSystem, failures: Failures) -> None:
    task = system.start_task(asyncio.Event().wait(), owner=B)  # type: ignore[arg-type] # its result is not used
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert failures == []


# --- shutdown ---


async def test_shutdown_delivers_what_is_queued_then_answers_nobody(system: ActorSystem) -> None:
    actor = spawn(system)
    system.tell(A, "last words")
    answered = system.ask(A, lambda asked: "answer")
    system.set_timer(A, "bound", 1, at=system.now() + 60)
    await system.shutdown()
    assert actor.received == ["last words"]
    assert await answered == "answer"
    assert not system.lives(A)
    with pytest.raises(ActorStopped):
        await system.ask(A, lambda asked: None)
    system.tell(A, "too late")
    assert system.dead_letters == {"TxEdge:str": 1}
    await system.shutdown()


async def test_shutdown_ends_a_chatter_that_never_rests_and_answers_its_questions(
    system: ActorSystem,
) -> None:
    spawn(system)

    def chatter() -> None:
        system.tell(A, chatter)

    system.tell(A, chatter)
    questions: list[asyncio.Future[Any]] = []
    spawn(system, B)

    def ask_late() -> None:
        questions.append(system.ask(B, lambda actor: ask_late()))

    system.tell(B, ask_late)
    await system.shutdown(timeout=0.02)
    assert isinstance(questions[-1].exception(), ActorStopped)
    assert [q.exception() for q in questions[:-1]] == [None] * (len(questions) - 1)


async def test_shutdown_cancels_tasks_and_is_bounded(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()
    ended: list[str] = []

    async def obedient() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("obedient")

    async def deaf() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                ended.append("deaf hears nothing")

    system.start_task(obedient(), owner=A)
    stubborn = system.start_task(deaf(), owner=B)
    await asyncio.sleep(0)
    before = system.now()
    await system.shutdown(timeout=0.05)
    assert system.now() - before < 2.0
    assert sorted(ended) == ["deaf hears nothing", "obedient"]
    assert "a task of RxEdge:2 did not end" in caplog.text
    release.set()
    await stubborn


# --- machines as actors ---


class LightState(StrEnum):
    DARK = "Dark"
    LIT = "Lit"


@dataclass(frozen=True, slots=True)
class Press:
    pass


@dataclass(frozen=True, slots=True)
class Glow(Effect):
    pass


L = LightState


class Light(Machine[LightState]):
    NAME = "Light"
    INITIAL = L.DARK
    TABLE = (
        Row(L.DARK, Press, "_press", (L.LIT,)),
        Row(L.LIT, Press, "_press_again", (L.DARK,)),
        Row(L.LIT, TimerFired, "_burnt_down", (L.DARK,)),
    )

    def _press(self, event: Press, now: float) -> Outcome[LightState]:
        self.pressed_at = now
        return L.LIT, (
            Glow(),
            Send(B, "on"),
            Emit(EventName.EDGE_READY, {"edge_id": 1}),
            self.set_timer("burn", now + 0.001),
            Glow(),
        )

    def _press_again(self, event: Press, now: float) -> Outcome[LightState]:
        return L.DARK, self.cancel_timer("burn")

    def _burnt_down(self, event: TimerFired, now: float) -> Outcome[LightState]:
        return L.DARK, (Send(B, "burnt down"),)


class Stage:
    """A light under A, its neighbour under B, and all that leaves the light."""

    def __init__(self, system: ActorSystem, **options: Any) -> None:
        self.log: list[Any] = []
        self.machine = Light()
        bus = EventBus(NodeId(7))
        bus.add_sink(
            lambda event: self.log.append({k: event[k] for k in event if k not in ("time", "number")})
        )
        options = {"perform": self.log.append, **options}
        system.spawn(A, MachineActor(system, A, machine=self.machine, bus=bus, **options))
        self.neighbour = spawn(system, B)


async def test_all_actions_of_a_step_are_performed_in_order_before_the_next_step(system: ActorSystem) -> None:
    stage = Stage(system, defaults={"run_id": 5, "edge_id": 0})
    before = system.now()
    system.tell(A, Press())
    system.tell(A, Press())
    await settled(system)
    event = {"event": "edge_ready", "node_id": f"{7:016x}", "run_id": 5, "edge_id": 1}
    assert stage.log == [Glow(), event, Glow()]
    assert before <= stage.machine.pressed_at <= system.now()
    assert stage.machine.state is L.DARK
    await settled(system, B)
    assert stage.neighbour.received == ["on"]


async def test_a_machine_s_timer_comes_back_to_it(system: ActorSystem) -> None:
    stage = Stage(system)
    system.tell(A, Press())
    await until(lambda: "burnt down" in stage.neighbour.received)
    assert (stage.machine.state, stage.machine.late_timers) == (L.DARK, 0)


async def test_a_send_for_nobody_here_may_be_taken_by_the_route(system: ActorSystem) -> None:
    routed: list[Send] = []

    def route(action: Send) -> bool:
        routed.append(action)
        return action.message == "on"

    stage = Stage(system, route=route)
    system.tell(A, Press())
    await settled(system)
    await settled(system, B)
    assert (routed, stage.neighbour.received) == ([], ["on"])
    system.stop(B)
    system.tell(A, Press())
    system.tell(A, Press())
    await settled(system)
    assert routed == [Send(B, "on")]
    assert not system.dead_letters


async def test_a_wrong_call_is_supervised_and_changes_nothing(
    system: ActorSystem, failures: Failures
) -> None:
    stage = Stage(system)
    system.tell(A, "dance")
    await settled(system)
    assert [(address, type(error)) for address, error in failures] == [(A, InvalidTransition)]
    assert stage.machine.state is L.DARK


async def test_an_effect_that_nobody_performs_is_a_defect_that_is_supervised(
    system: ActorSystem, failures: Failures
) -> None:
    Stage(system, perform=None)
    system.tell(A, Press())
    await settled(system)
    assert "Light has no adapter for Glow()" in str(failures[0][1])


async def test_a_cancelled_timer_of_a_machine_does_not_fire(system: ActorSystem) -> None:
    stage = Stage(system)
    system.tell(A, Press())
    system.tell(A, Press())
    system.set_timer(A, "later", 9, at=system.now() + 0.005)
    await until(lambda: stage.machine.late_timers > 0)
    assert stage.machine.late_timers == 1, "only the timer that this test set"
    assert CancelTimer("burn") not in stage.log
