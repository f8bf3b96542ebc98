"""A process killed, or stopped and resumed late, after every instruction of its step on the ring (spec 21).

`ring_sweep.c` single-steps the process; the survivor of each halt may see whole commits only, never waits
without a bound, and gets the range back with its proof. Wrong programs show that the sweep sees what it must.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ring_programs import COMPILERS, build, run

SCENES = {
    "produce into an empty ring": ("produce", "0", "0"),
    "produce across the wrap": ("produce", "14", "4"),
    "produce what makes it full": ("produce", "0", "12"),
    "consume from a full ring": ("consume", "0", "20"),
    "consume across the wrap": ("consume", "14", "20"),
    "consume what makes it empty": ("consume", "3", "8"),
}
WRAPS = [name for name in SCENES if "wrap" in name]
OTHERS = [name for name in SCENES if "wrap" not in name]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sweep"), "ring_sweep.c", "-O2")


def sweep(program: Path, action: str, scene: str) -> None:
    role, *numbers = SCENES[scene]
    done = run(program, role, action, *numbers)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    counted = re.fullmatch(r"instructions (\d+), untouched (\d+), moved (\d+)\n", done.stdout)
    assert counted, done.stdout
    instructions, untouched, moved = map(int, counted.groups())
    assert untouched + moved == instructions
    assert min(untouched, moved) >= 20, "the halts were not before and after the step's effect"


@pytest.mark.parametrize("scene", SCENES)
def test_killed_after_every_instruction(program, scene) -> None:
    sweep(program, "kill", scene)


@pytest.mark.parametrize("scene", OTHERS)
def test_stopped_after_every_instruction_and_resumed_late(program, scene) -> None:
    sweep(program, "stop", scene)


@pytest.mark.parametrize("scene", OTHERS[:1] + OTHERS[-1:])
def test_its_ring_taken_away_after_every_instruction(program, scene) -> None:
    sweep(program, "fence", scene)


@pytest.mark.long
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("level", ["-O0", "-O2", "-O3"])
@pytest.mark.parametrize("action", ["kill", "stop", "fence"])
@pytest.mark.parametrize("scene", ["produce into an empty ring", "consume from a full ring"])
def test_every_build_after_every_instruction(tmp_path, compiler, level, action, scene) -> None:
    sweep(build(tmp_path, "ring_sweep.c", level, compiler=compiler), action, scene)


@pytest.mark.long
@pytest.mark.parametrize("action", ["stop", "fence"])
@pytest.mark.parametrize("scene", WRAPS)
def test_stopped_across_the_wrap(program, action, scene) -> None:
    sweep(program, action, scene)


@pytest.mark.parametrize(
    ("switch", "role", "action", "finding"),
    [
        ("BROKEN_COMMIT_FIRST", "produce", "kill", "committed unwritten"),
        ("BROKEN_COMMIT_FIRST", "produce", "stop", "committed unwritten"),
        ("BROKEN_RELEASE_FIRST", "consume", "stop", "overwritten while they were read"),
        ("BROKEN_NO_HINT", "produce", "stop", "lost RingReadable"),
        ("BROKEN_NO_HINT", "consume", "stop", "lost RingWritable"),
        ("WITHOUT_PROOF", "produce", "reuse", "a late writer wrote into the new generation"),
        ("WITHOUT_PROOF", "consume", "reuse", "a late process moved the new generation"),
    ],
)
def test_the_sweep_finds_the_broken_program(tmp_path, switch, role, action, finding) -> None:
    program = build(tmp_path, "ring_sweep.c", "-O2", f"-D{switch}", "-DPATIENCE_MS=300")
    numbers = ("0", "0") if role == "produce" else ("0", "20")
    done = run(program, role, action, *numbers)
    assert done.returncode == 1
    assert re.fullmatch(rf"after \d+ instructions: .*{finding}.*\n", done.stdout), done.stdout
