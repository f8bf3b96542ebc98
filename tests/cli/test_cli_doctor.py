"""`doctor`: checks of machine and plug-ins, each guarded and bounded; its shapes and exit codes."""

from __future__ import annotations

import json
import os
import resource
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from swactor_cli import checks
from swactor_cli.checks import CORE_CHECKS
from swactor_cli.commands.doctor import guarded
from swactor_core import free_memory
from swactor_core.checks import CheckResult, CheckStatus, DoctorCheck

CHECK_FIELDS = {"type", "id", "plugin", "summary", "status", "detail", "remedy", "seconds"}


def records(said: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.out.splitlines()]


def test_every_check_of_core_and_plugins_is_reported_and_counted(call: Any) -> None:
    said = call("doctor", "--json")
    *found, result = records(said)
    assert all(set(record) == CHECK_FIELDS for record in found)
    ids = [record["id"] for record in found]
    assert len(ids) == len(set(ids))
    assert {check.id for check in CORE_CHECKS} <= set(ids)
    assert {record["plugin"] for record in found} >= {"core", "memfd", "quic", "gguf", "tinygrad"}
    statuses = [record["status"] for record in found]
    assert result["type"] == "result"
    assert result["counts"] == {status: statuses.count(status) for status in ("ok", "warn", "fail", "skip")}
    assert result["status"] == ("fail" if "fail" in statuses else "ok")
    assert said.code == (1 if "fail" in statuses else 0)
    assert said.err == ""
    assert all(record["remedy"] for record in found if record["status"] == "fail")


def test_people_get_one_line_a_check(call: Any) -> None:
    said = call("doctor")
    for check in CORE_CHECKS:
        line = next(line for line in said.out.splitlines() if check.id in line.split())
        assert line.split()[0] in ("ok", "warn", "fail", "skip")
    assert " ok" in said.err


def test_a_check_that_raises_fails_in_words() -> None:
    def broken() -> CheckResult:
        raise LookupError("gone")

    def leaving() -> CheckResult:
        raise SystemExit(4)

    assert guarded(DoctorCheck("x", "", broken)) == CheckResult(
        CheckStatus.FAIL, "the check failed: LookupError: gone"
    )
    assert guarded(DoctorCheck("x", "", leaving)).status is CheckStatus.FAIL


def test_a_check_that_returns_something_else_fails() -> None:
    wrong: Any = DoctorCheck("x", "", lambda: "fine")  # type: ignore[arg-type, return-value]
    assert guarded(wrong).status is CheckStatus.FAIL


def test_a_check_that_hangs_is_left_behind() -> None:
    release = threading.Event()

    def hanging() -> CheckResult:
        release.wait(60)
        return CheckResult(CheckStatus.OK, "late")

    began = time.monotonic()
    result = guarded(DoctorCheck("x", "", hanging), bound=0.2)
    release.set()
    assert result == CheckResult(CheckStatus.FAIL, "the check did not end within 0.2 s")
    assert time.monotonic() - began < 30


FAILING = """
    from swactor_core.checks import CheckResult, CheckStatus, DoctorCheck
    from swactor_core.hookspecs import hookimpl

    @hookimpl
    def swactor_doctor_checks():
        return [DoctorCheck("sick.heart", "is it well", lambda: CheckResult(CheckStatus.FAIL, "no", "rest"))]
"""


def test_a_failing_check_of_a_plugin_is_exit_1_with_its_remedy(spawn: Any, distribution: Any) -> None:
    path = str(distribution("swactor-sick", FAILING))
    said = spawn("doctor", PYTHONPATH=path)
    assert said.code == 1
    lines = said.out.splitlines()
    at = next(index for index, line in enumerate(lines) if "sick.heart" in line)
    assert lines[at].split() == ["fail", "sick.heart", "no"]
    assert lines[at + 1].strip() == "remedy: rest"


@pytest.mark.parametrize(
    ("body", "detail"),
    [("raise OSError('lost')", "OSError: lost"), ("return ['nothing']", "'nothing' is not a DoctorCheck")],
)
def test_a_plugin_that_cannot_name_its_checks_fails_alone(
    spawn: Any, distribution: Any, body: str, detail: str
) -> None:
    source = f"""
    from swactor_core.hookspecs import hookimpl

    @hookimpl
    def swactor_doctor_checks():
        {body}
    """
    said = spawn("doctor", "--json", PYTHONPATH=str(distribution("swactor-sick", source)))
    assert said.code == 1
    failed = [
        record for record in records(said) if record.get("status") == "fail" and record["type"] == "check"
    ]
    assert [record["id"] for record in failed] == ["swactor_sick.checks"]
    assert detail in failed[0]["detail"]
    assert any(record.get("id") == "arena.memfd" for record in records(said))


def test_a_plugin_that_does_not_load_is_a_warning_and_a_chosen_one_a_failure(
    spawn: Any, distribution: Any
) -> None:
    path = str(distribution("swactor-sick", "raise RuntimeError('no driver')"))
    by_id = {r.get("id"): r for r in records(spawn("doctor", "--json", PYTHONPATH=path))}
    assert by_id["swactor_sick.load"]["status"] == "warn"
    assert "no driver" in by_id["swactor_sick.load"]["detail"]
    assert by_id["core.plugins"]["status"] == "ok"
    said = spawn("doctor", "--json", "--worker", "sick", PYTHONPATH=path)
    assert said.code == 1
    by_id = {r.get("id"): r for r in records(said)}
    assert by_id["core.plugins"]["status"] == "fail"
    assert "no driver" in by_id["core.plugins"]["detail"]


@pytest.mark.parametrize(
    ("soft", "status"), [(20, CheckStatus.FAIL), (100, CheckStatus.WARN), (4096, CheckStatus.OK)]
)
def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, status: CheckStatus) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 8192))
    result = checks.check_open_files()
    assert result.status is status
    assert str(soft) in result.detail
    assert bool(result.remedy) == (status is not CheckStatus.OK)


def test_a_loopback_that_cuts_datagrams_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.socket.socket, "recv", lambda self, size: bytes(10))
    assert checks.check_udp() == CheckResult(
        CheckStatus.FAIL, "10 of 1200 bytes came back over loopback", checks.LOOPBACK
    )


def test_memory_is_the_lesser_of_machine_and_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "machine_rest", lambda: 8 << 30)
    monkeypatch.setattr(free_memory, "group_rest", lambda: 100 << 20)
    result = checks.check_memory()
    assert (result.status, result.detail) == (CheckStatus.WARN, "100.0 MiB are free in this control group")
    monkeypatch.setattr(free_memory, "group_rest", lambda: None)
    assert checks.check_memory() == CheckResult(CheckStatus.OK, "8.0 GiB are free")
    monkeypatch.setattr(free_memory, "machine_rest", lambda: None)
    assert checks.check_memory().status is CheckStatus.WARN


def test_a_free_threaded_python_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_python().status is CheckStatus.OK
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    result = checks.check_python()
    assert result.status is CheckStatus.WARN
    assert "free-threaded" in result.detail
    assert result.remedy


def test_a_machine_without_memfd_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    result = checks.check_memfd()
    assert result.status is CheckStatus.FAIL
    assert "Operation not permitted" in result.detail


def test_the_folder_of_keys_is_not_made_by_asking(home: Path) -> None:
    assert checks.check_state().status is CheckStatus.OK
    assert not (home / "state").exists()
