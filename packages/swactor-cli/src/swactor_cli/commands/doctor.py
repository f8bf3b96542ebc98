"""`swactor-cli doctor`: what this machine lacks, asked of the core and of every plug-in, each guarded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from swactor_core.checks import CheckResult, CheckStatus, DoctorCheck
from swactor_core.config import PluginChoice
from swactor_core.plugins import Plugins, PluginState

from swactor_cli.checks import CORE_CHECKS
from swactor_cli.commands.plugins import PluginOptions, chosen_plugins, unusable
from swactor_cli.errors import ExitCode
from swactor_cli.output import Output

CHECK_BOUND = 20.0
CORE = "core"
HOOK = "swactor_doctor_checks"


def doctor(options: PluginOptions, output: Output) -> ExitCode:
    """Runs every check, one after the other; exit 1 when any fails."""
    choice, plugins = chosen_plugins(options)
    counts = dict.fromkeys(CheckStatus, 0)
    for owner, check in [*((CORE, check) for check in CORE_CHECKS), *plugin_checks(choice, plugins)]:
        began = time.monotonic()
        result = guarded(check)
        counts[result.status] += 1
        if output.json_lines:
            output.record(_record(owner, check, result, time.monotonic() - began))
        else:
            remedy = f"\n      remedy: {result.remedy}" if result.remedy else ""
            output.text(f"{result.status:<6}{check.id:<20}{result.detail}{remedy}\n")
    if output.json_lines:
        status = CheckStatus.FAIL if counts[CheckStatus.FAIL] else CheckStatus.OK
        output.record(
            {"type": "result", "status": str(status), "counts": {str(k): v for k, v in counts.items()}}
        )
    else:
        output.note(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return ExitCode.FAULTED if counts[CheckStatus.FAIL] else ExitCode.COMPLETED


def plugin_checks(choice: PluginChoice, plugins: Plugins) -> Iterable[tuple[str, DoctorCheck]]:
    """The plug-in choice itself, every plug-in that did not load, then each plug-in's own checks.

    A plug-in whose hook fails, or gives something that is no check, gets a failing check in its name.
    """
    yield (
        CORE,
        DoctorCheck("core.plugins", "the chosen plug-ins are usable", lambda: _choice(choice, plugins)),
    )
    for record in plugins.records:
        if record.state in (PluginState.FAILED, PluginState.INCOMPATIBLE):
            found = CheckResult(
                CheckStatus.WARN, f"{record.state}: {record.reason}", f"repair {record.distribution}"
            )
            yield record.name, DoctorCheck(f"{record.name}.load", "the plug-in loads", partial(_known, found))
    for name, plugin in plugins.manager.list_name_plugin():
        hook = getattr(plugin, HOOK, None)
        if hook is None:
            continue
        try:
            checks = list(hook() or ())
            wrong = next((check for check in checks if not isinstance(check, DoctorCheck)), None)
            if wrong is not None:
                raise TypeError(f"{wrong!r} is not a DoctorCheck")
        except Exception as error:  # a plug-in may raise anything; its own line tells what
            failed = CheckResult(CheckStatus.FAIL, f"{HOOK} failed: {type(error).__name__}: {error}")
            yield name, DoctorCheck(f"{name}.checks", "the plug-in names its checks", partial(_known, failed))
        else:
            yield from ((name, check) for check in checks)


def _known(result: CheckResult) -> CheckResult:
    """A check whose result is known before it is run."""
    return result


def _choice(choice: PluginChoice, plugins: Plugins) -> CheckResult:
    errors = unusable(choice, plugins)
    if errors:
        return CheckResult(CheckStatus.FAIL, "; ".join(e.message for e in errors), errors[0].hint)
    chosen = ", ".join(f"{kind} {name}" for kind, name in choice.model_dump(exclude={"blocked"}).items())
    return CheckResult(CheckStatus.OK, chosen)


def guarded(check: DoctorCheck, bound: float = CHECK_BOUND) -> CheckResult:
    """The check's result; a check that raises or takes more than `bound` seconds fails in words.

    What hangs stays behind in a daemon thread, which the end of the process takes along.
    """
    results: list[CheckResult] = []

    def work() -> None:
        try:
            result: Any = check.run()
            if not isinstance(result, CheckResult):
                raise TypeError(f"it returned {result!r}")
        except BaseException as error:  # a check may raise anything, SystemExit too
            result = CheckResult(CheckStatus.FAIL, f"the check failed: {type(error).__name__}: {error}")
        results.append(result)

    thread = threading.Thread(target=work, daemon=True, name=f"doctor {check.id}")
    thread.start()
    thread.join(bound)
    return (
        results[0] if results else CheckResult(CheckStatus.FAIL, f"the check did not end within {bound:g} s")
    )


def _record(owner: str, check: DoctorCheck, result: CheckResult, seconds: float) -> dict[str, Any]:
    return {
        "type": "check",
        "id": check.id,
        "plugin": owner,
        "summary": check.summary,
        "status": str(result.status),
        "detail": result.detail,
        "remedy": result.remedy,
        "seconds": round(seconds, 3),
    }
