"""One node served to its end: the part that managed and unmanaged node processes share.

Knows signals and the lifeline; what the node is made of is `node.py`'s. Says nothing itself: the caller
reports the fault that it gets back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable

from swactor_core.config import NodeSettings
from swactor_core.faults import Fault
from swactor_core.hosting import refuse_separate_processes
from swactor_core.node.node import Node
from swactor_core.plugins import Plugins
from swactor_core.spi.membership import MemberState

log = logging.getLogger(__name__)

ABRUPT = 130


async def serve(
    settings: NodeSettings,
    plugins: Plugins,
    *,
    stop_on: Iterable[signal.Signals],
    lifeline: int | None = None,
    on_built: Callable[[Node], None] = lambda node: None,
) -> Fault | None:
    """Runs one node until it ends by itself or is told to stop; returns the fault that ended it, or None.

    The first of the signals `stop_on`, or the end of the descriptor `lifeline`, is an ordered stop, within
    the node's bounds; a second signal ends the process at once, and its worker with it, also where a plug-in
    blocks the loop. Raises PluginError, ConfigError or UsageError for settings that no node process can be
    built from.

    A clock that was set back makes this start seem older than the one before, and the others refuse it. Once
    they say that the one before has ended, the node begins anew with an epoch above that one's.
    """
    refuse_separate_processes(plugins, settings.plugins)
    node = Node(settings, plugins)
    on_built(node)
    loop = asyncio.get_running_loop()
    signals = 0
    let_go = False

    def came(*_: object) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os._exit(ABRUPT)

    def lifeline_moved(descriptor: int) -> None:
        nonlocal let_go
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            let_go = True
            node.stop()

    for number in stop_on:
        if signal.getsignal(number) is signal.SIG_IGN:  # nohup and shells in the background mean it
            continue
        loop.add_signal_handler(number, lambda: node.stop())  # which makes each of them wake the loop
        signal.signal(number, came)
    if lifeline is not None:
        loop.add_reader(lifeline, lifeline_moved, lifeline)
    try:
        fault = await node.run()
        former = node.replaced_by
        ended = former is not None and former.state in (MemberState.DEAD, MemberState.LEFT)
        told_to_stop = signals > 0 or let_go
        if former is None or not ended or former.node_id != node.node_id or told_to_stop:
            return fault
        log.warning("starting again, later than epoch %d: this machine's clock was set back", former.epoch)
        node = Node(settings, plugins, epoch=former.epoch + 1)
        on_built(node)
        return await node.run()
    finally:
        if lifeline is not None:
            loop.remove_reader(lifeline)
