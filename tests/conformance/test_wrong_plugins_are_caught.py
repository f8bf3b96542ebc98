"""Every wrong plug-in is caught by the contract test that its defect names, for the reason it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from wrong_kit import HERE, UNBROKEN, Defect, Outcome, defects_of, has_unbroken, plain, run

MODULES = [file.stem for file in HERE.glob("wrong_*.py") if file.stem != "wrong_kit"]
MODULES.sort(key=lambda module: (-len(defects_of(module)), module))  # the longest first: two run at once
DEFECTS = [defect for module in MODULES for defect in defects_of(module)]
OutcomeOf = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest) -> Iterator[OutcomeOf]:
    """The run of a module; two run at once: they wait more than they compute. A test waits for its own."""
    here = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params for item in here if hasattr(item, "callspec")]
    modules = {params["module"] if "module" in params else params["defect"].module for params in chosen}
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = {module: pool.submit(run, module) for module in MODULES if module in modules}
        yield lambda module: runs[module].result()


@pytest.mark.parametrize("module", [module for module in MODULES if has_unbroken(module)])
def test_the_unbroken_wrapping_passes_everything(module: str, outcome_of: OutcomeOf) -> None:
    """Else a defect could be caught for the wrapping's sake."""
    outcome = outcome_of(module)
    assert not [key for key in outcome.failed if key[0] == UNBROKEN], outcome.output
    assert outcome.skipped == []
    assert outcome.passed[UNBROKEN] > 6


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: f"{defect.module}-{defect.name}")
def test_a_defect_is_caught(defect: Defect, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(defect.module)
    texts = outcome.failed.get((defect.name, plain(defect.test)), [])
    assert texts, f"{defect.test} lets {defect.name} pass\n{outcome.output}"
    found = [text for text in texts if re.search(defect.saying, text)]
    assert found, f"{defect.test} fails for another reason than {defect.saying!r}:\n{texts[0]}"


def test_there_is_a_wrong_module_for_every_kind() -> None:
    kinds = ("arena", "loader", "membership", "transport", "worker")
    assert set(MODULES) >= {f"wrong_{kind}s" for kind in kinds}
