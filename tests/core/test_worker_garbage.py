"""The worker's process and Python's garbage collector: off while it starts, on while it runs."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, sys, weakref
frozen_by_python = gc.get_freeze_count()  # 3.12 begins with some
from swactor_core.ids import RoleId, WorkerGeneration
from swactor_core.messages import RoleConfigured, RoleReset, WorkerReady
from swactor_core.worker import __main__ as worker
from swactor_core.worker.adapter import CommandReader, EventWriter

seen = []
def serve(harness, reader, writer):
    outside = harness._outside
    for event in (None, WorkerReady(1, WorkerGeneration(1), 1, {}), RoleConfigured(RoleId("r"))):
        if event is not None:
            outside.emit(event)
        seen.append((gc.isenabled(), gc.get_freeze_count() > frozen_by_python))
    class Role:
        pass
    role = Role()
    role.itself, gone = role, weakref.ref(role)
    outside.emit(RoleConfigured(RoleId("r")))
    del role
    outside.emit(RoleReset(RoleId("r")))
    seen.append((gone() is None, gc.get_freeze_count() > frozen_by_python))
    return worker.ExitCode.STOPPED
worker.serve = serve
code = worker.main(["--worker", "none", "--arena", "none"])
print(json.dumps([code, seen]), file=sys.stderr)
"""


def test_a_start_is_not_walked_over_and_a_run_is_collected() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    code, seen = json.loads(done.stderr.splitlines()[-1])
    assert code == 0
    assert seen == [[False, False], [True, True], [True, True], [True, True]], (
        "before WorkerReady, after it, after RoleConfigured; what a role left, after RoleReset"
    )
