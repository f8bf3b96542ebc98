"""Which content an address has: asked of its server, or as it was when last asked.

Decides when a server need not be asked, when it is not waited for, and says so. Knows `web` and `known`; must
not know what the content is.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from urllib.parse import urlsplit

from swactor_core.config import offline
from swactor_core.values import frozen

from swactor_loader_gguf.known import Known, keep, recall, shown
from swactor_loader_gguf.reach import Unreachable, refuse_when_offline
from swactor_loader_gguf.web import WebFile

HEAD_BYTES = 64 << 10
ASK_S = 8.0
"""Seconds that a server is waited for when all that it could say is that nothing has changed. Bounds also
what has no bound of its own: a resolver without a network, a host of many addresses."""

_SILENCE_S = 30.0  # after which a host that did not answer is asked again, by this process
_POLL_S = 0.1
_silent_since: dict[str, float] = {}
_log = logging.getLogger(__name__)


@frozen
class Answer:
    """`fresh`: the server has just said it, through `web`; else it has not been asked, or did not answer."""

    web: WebFile
    known: Known
    fresh: bool


def identify(
    web: WebFile,
    *,
    enough: Callable[[Known], bool],
    settled: Callable[[Known], bool] = lambda known: False,
    check: Callable[[], None],
) -> Answer:
    """What `web` is. `enough` says of what is kept whether a run might go on with it; then the server is
    asked for no longer than ASK_S, and not at all where that is `settled`: it could say nothing new.

    Closes `web` where it raises, or where the answer has another one. `check` is called while it waits.
    Raises Unreachable without an answer and enough; ModelError; and whatever `check` raises.
    """
    try:
        known = recall(web.url)
        if known is None or not enough(known):
            refuse_when_offline(f"{shown(web.url)}, which is not in the cache,")
            return Answer(web, ask(web, check), True)
        if settled(known) or offline():
            return Answer(web, known, False)
        host = urlsplit(web.url).netloc
        if time.monotonic() - _silent_since.get(host, -_SILENCE_S) < _SILENCE_S:
            return Answer(web, known, False)
        try:
            answer = _ask_in_time(web, check)
        except Unreachable as error:
            _silent_since[host] = time.monotonic()
            _log.warning(
                "%s: its server cannot be reached (%s); going on with what the cache has, as of %s",
                known.address,
                error.why,
                known.since,
            )
            return Answer(web, known, False)
        _silent_since.pop(host, None)
        web.close()
        return answer
    except BaseException:
        web.close()
        raise


def ask(web: WebFile, check: Callable[[], None]) -> Known:
    """What the server says, which is kept. Raises ModelError."""
    identity = web.probe(check)
    head = ""
    if not identity.validator:
        first = b"".join(web.stream(0, min(HEAD_BYTES, identity.size), check=check))
        head = hashlib.sha256(first).hexdigest()
    known = Known(shown(web.url), identity, head)
    keep(web.url, known)
    return known


def _ask_in_time(web: WebFile, check: Callable[[], None]) -> Answer:
    """Asks in a thread of its own, which is left behind when it takes too long: nothing else ends a look-up
    of names. Raises ModelError."""
    hurried, answer, left = web.hurried(), Future[Known](), threading.Event()

    def asking() -> None:
        try:
            answer.set_result(ask(hurried, lambda: None))
        except BaseException as error:  # told to who waits
            answer.set_exception(error)
        if left.is_set() or answer.exception() is not None:
            hurried.close()

    threading.Thread(target=asking, name="swactor-ask", daemon=True).start()
    until = time.monotonic() + ASK_S
    try:
        while not wait([answer], timeout=_POLL_S).done:
            check()
            if time.monotonic() >= until:
                why = f"no answer in {ASK_S:.0f} s"
                raise Unreachable(f"{shown(web.url)}: {why}", hint="check the network", why=why)
        known = answer.result()
    except BaseException:
        left.set()
        if answer.done():
            hurried.close()
        raise
    hurried.as_patient_as(web)
    return Answer(hurried, known, True)
