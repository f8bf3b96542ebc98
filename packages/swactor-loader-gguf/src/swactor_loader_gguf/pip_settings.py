"""Where this machine's pip would look for packages, for a machine that has only uv.

Knows pip's configuration files and variables (pip documentation, "Configuration") and uv's variables of the
same meaning. Names no index itself: without settings the tool's own default stands.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path

# pip's option, uv's variable, and the newer uv variables that overrule it
_OPTIONS = (
    ("index-url", "UV_INDEX_URL", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
    ("extra-index-url", "UV_EXTRA_INDEX_URL", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
    ("find-links", "UV_FIND_LINKS", ("UV_FIND_LINKS",)),
    ("cert", "SSL_CERT_FILE", ("SSL_CERT_FILE",)),
)
_SECTIONS = ("global", "install", "download")


def _config_files(environment: Mapping[str, str]) -> list[Path]:
    """pip's configuration files, the weakest first."""
    chosen = environment.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return []
    home = Path(environment.get("HOME", "/nonexistent"))
    system = [
        Path(folder) / "pip/pip.conf" for folder in environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    ]
    user = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = [
        *system,
        Path("/etc/pip.conf"),
        home / ".pip/pip.conf",
        user / "pip/pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    return [*files, Path(chosen)] if chosen else files


def _configured(environment: Mapping[str, str]) -> dict[str, str]:
    """pip's options by name, as its files and variables together say."""
    found: dict[str, str] = {}
    for path in _config_files(environment):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue  # pip itself will complain about its own file
        for section in _SECTIONS:
            if parser.has_section(section):
                found.update(parser.items(section))
    for option, _, _ in _OPTIONS:
        value = environment.get("PIP_" + option.upper().replace("-", "_"))
        if value:
            found[option] = value
    return found


def uv_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environment` in which uv looks where pip would, unless uv was told otherwise."""
    result, configured = dict(environment), _configured(environment)
    for option, variable, overruling in _OPTIONS:
        value = " ".join(configured.get(option, "").split())
        if value and not any(environment.get(name) for name in overruling):
            # uv splits find-links at commas and the index lists at blanks
            result[variable] = value.replace(" ", ",") if variable == "UV_FIND_LINKS" else value
    return result
