"""What aioquic imports and nobody here uses is loaded when it is used, and is then itself."""

from __future__ import annotations

import subprocess
import sys


def said(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_the_transport_does_not_load_what_compares_names() -> None:
    made = "from swactor_transport_quic.plugin import create_plugin; create_plugin()"
    assert (
        said(f"{made}\nimport sys\nprint('aioquic.tls' in sys.modules, 'attr' in sys.modules)")
        == "True False"
    )


def test_a_deferred_module_becomes_the_module_when_it_is_used() -> None:
    code = """
from swactor_transport_quic.deferred import load_when_used
load_when_used("service_identity")
import service_identity as first
from aioquic import tls
assert "cryptography" not in vars(first)
assert tls.service_identity is first
assert first.cryptography.verify_certificate_hostname
import service_identity as second
assert second.VerificationError is first.VerificationError is tls.service_identity.VerificationError
import service_identity.cryptography
print("the same")
"""
    assert said(code) == "the same"


def test_a_module_that_is_there_or_missing_is_left_alone() -> None:
    code = """
import sys, json
from swactor_transport_quic.deferred import load_when_used
load_when_used("json")
load_when_used("no_such_module_at_all")
print(sys.modules["json"] is json, "no_such_module_at_all" in sys.modules)
"""
    assert said(code) == "True False"


def test_what_a_deferred_module_lacks_is_said_as_always() -> None:
    code = """
from swactor_transport_quic.deferred import load_when_used
load_when_used("service_identity")
import service_identity
try:
    service_identity.nothing
except AttributeError as error:
    print(error)
"""
    assert "service_identity has no attribute nothing" in said(code).replace("'", "")
