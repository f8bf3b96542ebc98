"""Settings of a worker, checked before anything is started: `Provider.check_settings` (`spi/provider.py`).

A mistake is found on the operator's machine, by the setting's name, and not by a worker that dies on a node.
A provider without a check promises nothing here; its factory is asked by every run.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from swactor_core.errors import ConfigError

from swactor_testing.conformance.judging import JudgingContract

UNKNOWN = "no_setting_has_this_name"
MALFORMED = {"nested": [1, None]}


def surroundings() -> dict[str, object]:
    """What a check must leave as it was: children, threads, open files, environment, folder."""
    me, children = str(os.getpid()), []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", number, "stat").read_text()
        except OSError:  # it has ended
            continue
        if stat.rpartition(")")[2].split()[1] == me:
            children.append(number)
    return {
        "children": children,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "open files": len(os.listdir("/proc/self/fd")),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }


class SettingsContract(JudgingContract):
    """What a worker's check says of settings, and what it does not do."""

    def _check(self) -> Callable[[Mapping[str, Any]], object]:
        return self.provider().check_settings or (lambda settings: None)

    def _refused(self, settings: Mapping[str, Any], name: str) -> None:
        """By the check and the factory, with the setting's name and the remedy. A check is of use only when
        the factory agrees."""
        if self.provider().check_settings is None:
            return
        with pytest.raises(ConfigError) as caught:
            self._check()(settings)
        assert name in caught.value.message, f"the error does not name {name!r}: {caught.value.message}"
        with pytest.raises(ConfigError):
            self.provider().factory(settings=settings).close()

    def test_settings_that_the_worker_is_run_with_are_taken(self) -> None:
        """`check_settings` raises for what the factory would refuse, and for no other: not for none at all,
        nor for those of this test suite."""
        self._check()({})
        self._check()(self.capabilities.settings)

    def test_an_unknown_setting_is_refused_by_name(self) -> None:
        """Beside others that are right: ConfigError, which is bad usage, and a hint."""
        self._refused({**self.capabilities.settings, UNKNOWN: "1"}, UNKNOWN)
        if self.provider().check_settings is not None:
            with pytest.raises(ConfigError) as caught:
                self._check()({UNKNOWN: "1"})
            assert caught.value.hint, "an error without a remedy"

    def test_a_malformed_setting_is_refused_by_name(self) -> None:
        """A value that no setting can have, and those that the capabilities call wrong."""
        malformed = dict.fromkeys(self.capabilities.settings, MALFORMED)
        for name, value in {**malformed, **self.capabilities.wrong_settings}.items():
            self._refused({**self.capabilities.settings, name: value}, name)

    def test_a_machine_that_can_run_the_worker_is_not_refused(self) -> None:
        """`check_machine` says of this one, on which the factory does, that nothing is missing; alike again,
        and nothing stays of it."""
        check = self.provider().check_machine
        if check is None:
            return
        check(self.capabilities.settings)  # what is imported for it may stay
        before = surroundings()
        check(self.capabilities.settings)
        after = surroundings()
        for what, value in before.items():
            assert after[what] == value, f"a check changed the {what}"

    def test_checking_settings_starts_and_changes_nothing(self) -> None:
        """No process, no thread, no open file, no environment: it is called where nothing runs yet. What is
        checked stays as it was, and is checked alike again."""
        check = self._check()
        check({})  # what is imported for it may stay
        given = dict(self.capabilities.settings)
        kept = copy.deepcopy(given)
        before = surroundings()
        for settings in (given, {}, given):
            check(settings)
        for _ in range(2):
            with contextlib.suppress(ConfigError):
                check({UNKNOWN: "1"})
        after = surroundings()
        for what, value in before.items():
            assert after[what] == value, f"a check changed the {what}"
        assert given == kept, "a check changed the settings"
