"""The kit as its user meets it: the documented example, pytest's strict mode, mocks without pytest."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from swactor_core.spi.provider import Kind
from swactor_testing import conformance

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    Kind.ARENA: conformance.ArenaContract,
    Kind.LOADER: conformance.LoaderContract,
    Kind.MEMBERSHIP: conformance.MembershipContract,
    Kind.TRANSPORT: conformance.TransportContract,
    Kind.WORKER: conformance.WorkerContract,
}
TESTS = [
    (contract, name)
    for contract in CONTRACTS.values()
    for name, _ in inspect.getmembers(contract, inspect.isfunction)
    if name.startswith("test_")
]


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def carrier(tmp_path: Path) -> Path:
    """The documented plug-in as an installed distribution; behind the name carrier works a real one."""
    (entry,) = [block for block in blocks("toml") if "swactor-transport-carrier" in block]
    (module,) = [
        block for block in blocks("python") if block.startswith("# swactor_transport_carrier/plugin.py")
    ]
    (test,) = [block for block in blocks("python") if block.startswith("# tests/test_carrier_conforms.py")]
    package = tmp_path / "swactor_transport_carrier"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(module)
    (package / "transport.py").write_text(
        "from swactor_transport_quic.transport import QuicPlugin as CarrierPlugin\n"
    )
    info = tmp_path / "swactor_transport_carrier-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swactor-transport-carrier\nVersion: 0.1.0\n")
    points = re.search(r"\[project\.entry-points\.swactor\]\n(.*)", entry, re.DOTALL)
    assert points is not None
    (info / "entry_points.txt").write_text("[swactor]\n" + points[1].replace('"', ""))
    (tmp_path / "test_carrier_conforms.py").write_text(test)
    return tmp_path


def test_the_documented_example_runs_in_strict_mode(carrier: Path) -> None:
    """A part of it: a killed process that loads the plug-in by its name, bytes, control, registration. What
    the author's own tests have set for event loops does not matter."""
    chosen = "registered or killed or whole or lowered"
    scopes = [f"asyncio_default_{what}_loop_scope=session" for what in ("fixture", "test")]
    done = run_pytest(carrier, "-W", "error", *(f"-o{scope}" for scope in scopes), "-k", chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"1\d passed", done.stdout), done.stdout


def test_an_heir_without_its_fixture_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_heir.py").write_text(
        "from swactor_testing.conformance import ArenaCapabilities, ArenaContract\n"
        "class TestHeir(ArenaContract):\n"
        "    capabilities = ArenaCapabilities(provider='heap')\n"
    )
    done = run_pytest(tmp_path, "-k", "ceiling_and_ends_twice")
    assert done.returncode == 1
    assert "TestHeir needs a fixture `plugin` with the part under test" in done.stdout


def test_a_failure_explains_itself(tmp_path: Path) -> None:
    """Assertions of the contracts are rewritten like those of a test module."""
    (tmp_path / "test_heir.py").write_text(
        "import pytest\n"
        "from swactor_testing.conformance import ArenaCapabilities, ArenaContract\n"
        "from swactor_testing.heap import HeapArenas\n"
        "class TestHeir(ArenaContract):\n"
        "    capabilities = ArenaCapabilities(provider='heap', crosses_processes=True)\n"
        "    @pytest.fixture\n"
        "    def plugin(self):\n"
        "        return HeapArenas()\n"
    )
    done = run_pytest(tmp_path, "-k", "registered or attached_view")
    assert done.returncode == 1
    assert "assert False == True" in done.stdout


@pytest.mark.parametrize(("contract", "name"), TESTS, ids=lambda value: getattr(value, "__name__", value))
def test_every_test_says_which_guarantee_it_holds(contract: type, name: str) -> None:
    assert inspect.getdoc(getattr(contract, name)), f"{contract.__name__}.{name} has no docstring"


def test_there_is_a_contract_for_every_kind_that_is_chosen() -> None:
    assert set(CONTRACTS) == set(Kind) - {Kind.SINK}
    assert all(contract.kind is kind for kind, contract in CONTRACTS.items())


def test_mocks_need_no_pytest() -> None:
    program = (
        "import sys; sys.modules['pytest'] = sys.modules['pytest_asyncio'] = None\n"
        "import swactor_testing.plugin as p\n"
        "p._heap_arenas(); p._memory_transports(); p._static_memberships(); p._synthetic_loader()\n"
        "p._echo_backend({}); print('hypothesis' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("lacking", ["pytest", "pytest_asyncio"])
def test_a_contract_without_its_extra_names_it(lacking: str) -> None:
    code = f"import sys; sys.modules[{lacking!r}] = None; import swactor_testing.conformance"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"needs {lacking}: pip install 'swactor-testing[conformance]'" in done.stderr
