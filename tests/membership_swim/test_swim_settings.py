"""Profiles and settings: values that cannot work together are refused in words."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.errors import ConfigError
from swactor_membership_swim.settings import LAN, LOCAL, SwimSettings, settings_from


def test_profiles() -> None:
    assert settings_from({}) is not None
    assert settings_from({}) == settings_from({"profile": "lan"}) == LAN
    assert settings_from({"profile": "local", "seed": 5}) == LOCAL
    assert LOCAL.detection_bound(3) == pytest.approx(1.5)
    for profile in (LAN, LOCAL):
        assert settings_from(asdict(profile)) == profile, "a profile passes its own checks"


def test_single_values_replace_those_of_the_profile() -> None:
    settings = settings_from({"profile": "local", "suspicion_max": 2, "relays": 5})
    assert settings.suspicion_max == 2.0
    assert settings.relays == 5
    assert settings.probe_interval == LOCAL.probe_interval


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"profile": "wan"}, "profile 'wan'"),
        ({"probe_intervall": 1.0}, "'probe_intervall' is unknown"),
        ({"probe_interval": "1"}, "probe_interval = '1'"),
        ({"relays": 1.5}, "relays = 1.5"),
        ({"relays": True}, "relays = True"),
        ({"suspicion_max": float("nan")}, "suspicion_max = nan"),
        ({"suspicion_max": float("inf")}, "suspicion_max = inf"),
        ({"probe_timeout": 0.5}, "shorter than probe_interval"),
        ({"suspicion_min": 5.0}, "within suspicion_min"),
        ({"suspicion_min": 0.1}, "at least one probe_interval"),
        ({"tombstone": 5.0}, "ten times suspicion_max"),
        ({"packet_limit": 500}, "packet_limit"),
        ({"member_limit": 1}, "member_limit"),
    ],
)
def test_bad_values_are_named(values, text) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        settings_from(values)


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(-10, 10**6))


@given(st.dictionaries(st.sampled_from([field.name for field in fields(SwimSettings)]), numbers, max_size=5))
def test_any_values_give_working_settings_or_a_configuration_error(values) -> None:
    """[42] A minimum above a maximum, and everything else, is found before the start."""
    try:
        settings = settings_from(values)
    except ConfigError:
        return
    assert (
        settings.probe_timeout < settings.probe_interval <= settings.suspicion_min <= settings.suspicion_max
    )
    assert settings.detection_bound(7) > settings.suspicion_max
