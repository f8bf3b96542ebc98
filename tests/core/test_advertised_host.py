"""At which address a process says it can be reached: what is given, what is bound, or the way to a seed."""

from __future__ import annotations

import pytest
from swactor_core.errors import ConfigError
from swactor_core.node.addresses import advertised_host


def test_what_is_given_comes_first_then_what_is_bound() -> None:
    assert advertised_host("0.0.0.0", "pool.example", ()) == "pool.example"
    assert advertised_host("10.0.0.5", "", ("127.0.0.1:7946",)) == "10.0.0.5"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", ""])
def test_a_process_that_listens_everywhere_has_the_address_towards_the_first_usable_seed(
    everywhere: str,
) -> None:
    seeds = ("nowhere.invalid:7946", "a..b:7946", f"{'x' * 64}:7946", "127.0.0.1:7946")
    assert advertised_host(everywhere, "", seeds) == "127.0.0.1"


@pytest.mark.parametrize("seeds", [(), ("a..b:7946",)])
def test_without_a_usable_seed_the_operator_has_to_say_it(seeds: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="at which address others reach it") as caught:
        advertised_host("0.0.0.0", "", seeds)
    assert "--advertise" in caught.value.hint
