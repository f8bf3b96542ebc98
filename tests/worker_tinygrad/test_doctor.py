"""Doctor checks say what is there and never raise."""

from __future__ import annotations

from pathlib import Path

import pytest
from swactor_core.checks import CheckStatus
from swactor_worker_tinygrad import doctor, environment


def test_checks_of_this_host_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    results = {check.id: check.run() for check in doctor.CHECKS}
    assert {name: result.status for name, result in results.items()} == dict.fromkeys(results, CheckStatus.OK)
    assert "CPU" in results["tinygrad-devices"].detail


def test_a_host_without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    result = doctor.check_compiler()
    assert (result.status, result.remedy) == (CheckStatus.FAIL, "apt-get install clang")
    assert doctor.check_cache().status is CheckStatus.OK


@pytest.mark.parametrize("script", ["exit 1", "echo clang; cat > /dev/null; echo no object"])
def test_a_compiler_that_does_not_compile(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "clang-19"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CC", raising=False)
    assert doctor.check_compiler().status is CheckStatus.FAIL


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "clang-19"
    slow.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor, "BOUND_SECONDS", 0.2)
    assert doctor.check_compiler().status is CheckStatus.FAIL


def test_another_version_and_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "TINYGRAD_VERSION", "1.0")
    assert doctor.check_version().status is CheckStatus.FAIL
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert doctor.check_cache().status is CheckStatus.WARN
    assert list(tmp_path.iterdir()) == [blocked], "the probe leaves nothing behind"
