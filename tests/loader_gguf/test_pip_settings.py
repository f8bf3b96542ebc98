"""pip_settings.py: uv looks where pip would, on a machine that is configured for pip only."""

from __future__ import annotations

import os

import pytest
from swactor_loader_gguf.pip_settings import uv_environment

MIRROR, OTHER = "https://mirror.test/simple", "https://other.test/simple"


@pytest.fixture
def environment(tmp_path):
    """An environment whose configuration files are this test's."""
    return {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CONFIG_DIRS": str(tmp_path / "xdg"),
    }


def configure(tmp_path, text, place="config/pip/pip.conf"):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_user_configuration(environment, tmp_path):
    configure(tmp_path, f"[global]\nindex-url = {MIRROR}\nfind-links = /a /b\ncert = /c.pem\n")
    result = uv_environment(environment)
    assert result["UV_INDEX_URL"] == MIRROR
    assert result["UV_FIND_LINKS"] == "/a,/b"
    assert result["SSL_CERT_FILE"] == "/c.pem"
    assert result["HOME"] == environment["HOME"]


def test_variables_overrule_files(environment, tmp_path):
    configure(tmp_path, f"[global]\nindex-url = {MIRROR}\n")
    result = uv_environment(
        environment | {"PIP_INDEX_URL": OTHER, "PIP_EXTRA_INDEX_URL": f"{MIRROR}\n{OTHER}"}
    )
    assert result["UV_INDEX_URL"] == OTHER
    assert result["UV_EXTRA_INDEX_URL"] == f"{MIRROR} {OTHER}"


def test_user_files_overrule_system_files(environment, tmp_path):
    configure(tmp_path, f"[global]\nindex-url = {OTHER}\n", "xdg/pip/pip.conf")
    assert uv_environment(environment)["UV_INDEX_URL"] == OTHER
    configure(tmp_path, f"[install]\nindex-url = {MIRROR}\n")
    assert uv_environment(environment)["UV_INDEX_URL"] == MIRROR


@pytest.mark.parametrize("variable", ["UV_INDEX_URL", "UV_DEFAULT_INDEX"])
def test_uvs_own_settings_stand(environment, variable):
    result = uv_environment(environment | {"PIP_INDEX_URL": MIRROR, variable: OTHER})
    assert result[variable] == OTHER
    assert MIRROR not in result.get("UV_INDEX_URL", "")


def test_a_chosen_file_and_no_file(environment, tmp_path):
    configure(tmp_path, f"[global]\nindex-url = {OTHER}\n")
    configure(tmp_path, f"[global]\nindex-url = {MIRROR}\n", "chosen.conf")
    chosen = environment | {"PIP_CONFIG_FILE": str(tmp_path / "chosen.conf")}
    assert uv_environment(chosen)["UV_INDEX_URL"] == MIRROR
    assert "UV_INDEX_URL" not in uv_environment(environment | {"PIP_CONFIG_FILE": os.devnull})


@pytest.mark.parametrize("text", ["no section", "[global\n", "[global]\nindex-url = %(x)s\n", "\xff"])
def test_a_configuration_that_cannot_be_read_does_not_stop_us(environment, tmp_path, text):
    configure(tmp_path, text)
    assert uv_environment(environment)["HOME"] == environment["HOME"]
