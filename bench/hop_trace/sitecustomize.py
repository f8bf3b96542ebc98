"""Stamps of the token's way, in every process of a pipeline: loaded by Python itself where `hop.py` puts this
folder on PYTHONPATH and names a folder for the stamps in SWACTOR_HOP_TRACE. Costs some 2 us a stamp.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import os
import sys
import time
from typing import Any

FOLDER = os.environ.get("SWACTOR_HOP_TRACE", "")
STAMPS: list[tuple[int, str]] = []

WATCHED = {
    "swactor_transport_quic.endpoint": (("Endpoint", "_read_batch", "read"), ("Endpoint", "send", "send")),
    "swactor_core.node.pumps": (("_PumpTask", "_perform", "pump"),),
    "swactor_core.node.worker_process": (("WorkerProcess", "_write", "command"),),
    "swactor_core.node.event_pipe": (("EventPipe", "_readable", "events"),),
    "swactor_core.worker.adapter": (
        ("CommandReader", "fill", "wait"),
        ("EventWriter", "flush", "flush"),
    ),
    "swactor_core.orchestrator.endpoint": (("EndpointAdapter", "_perform", "endpoint"),),
    "swactor_core.actors.system": (("ActorSystem", "_drain", "actors"),),
}
"""Module: (class, method, label); a call leaves `label>` and `label<`."""


def watch(owner: Any, method: str, label: str) -> None:
    call = getattr(owner, method)
    before, after, clock, keep = label + ">", label + "<", time.monotonic_ns, STAMPS.append

    def stamped(*arguments: Any, **keywords: Any) -> Any:
        keep((clock(), before))
        result = call(*arguments, **keywords)
        keep((clock(), after))
        return result

    setattr(owner, method, stamped)


class Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and adds the stamps to what is watched."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in WATCHED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_watch(module: Any) -> None:
            execute(module)
            for owner, method, label in WATCHED[name]:
                watch(getattr(module, owner), method, label)

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def save() -> None:
    program = sys.argv[0].replace(os.sep, "/")
    role = next((name for name in ("worker", "node") if f"/{name}/__main__" in program), "first")
    if len(STAMPS) > 100:
        with open(f"{FOLDER}/{role}.{os.getpid()}", "w", encoding="ascii") as file:
            file.writelines(f"{stamp} {label}\n" for stamp, label in STAMPS)


if FOLDER:
    sys.meta_path.insert(0, Finder())
    atexit.register(save)
