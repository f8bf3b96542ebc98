"""Ctrl-C while a command begins: exit 130 and not a word, whenever it comes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from swactor_cli import interrupts

TINY = Path(__file__).parent.parent / "data" / "tiny" / "llama-gqa.gguf"
LONGEST = 60.0
# Sends itself a signal at its n-th import after the entry module; for 0 it says how many there are.
AT_AN_IMPORT = """
import atexit, os, signal, sys
moment, number, count, begun = int(sys.argv.pop(1)), int(sys.argv.pop(1)), 0, False
def interrupt(event, arguments):
    global count
    if begun and event == "import":
        count += 1
        if count == moment:
            os.kill(os.getpid(), number)
sys.addaudithook(interrupt)
if not moment:
    atexit.register(lambda: print("imports", count, file=sys.stderr))
from swactor_cli.entry import main
begun = True
main()
"""
IN_A_FINALIZER = """
import os, signal, time
import swactor_cli.entry, swactor_cli.app
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass
def main():
    Finalized()
    time.sleep(60)
swactor_cli.app.main = main
swactor_cli.entry.main()
"""
TWICE = """
import os, signal, time
import swactor_cli.entry, swactor_cli.app
def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
swactor_cli.app.main = main
swactor_cli.entry.main()
"""
# Interrupts itself when a node process has begun, and says at its end which it did not wait for.
IN_A_START = """
import asyncio, atexit, os, signal, sys
import swactor_cli.entry
start, begun, number = asyncio.create_subprocess_exec, [], int(sys.argv.pop(1))
async def interrupted(*arguments, **options):
    begun.append(await start(*arguments, **options))
    os.kill(os.getpid(), number)
    return begun[-1]
asyncio.create_subprocess_exec = interrupted
atexit.register(lambda: print(len(begun), *(process.returncode for process in begun)))
swactor_cli.entry.main()
"""
COMMANDS = {
    "version": ("version",),
    "plan": ("plan", str(TINY)),
    "run": ("run", str(TINY), "--prompt-ids", "1", "--max-tokens", "1", "--worker", "echo"),
}


def python(source: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        stdin=subprocess.DEVNULL,
        check=False,
        **options,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_at_any_import_ends_the_command_without_a_word(home: Path, name: str) -> None:
    whole = python(AT_AN_IMPORT, "0", "0", *COMMANDS[name])
    assert whole.returncode == 0, whole.stderr
    imports = int(whole.stderr.split()[-1])
    assert imports > 40
    moments = sorted({1, 2, 3, *(imports * part // 6 for part in range(1, 6))})
    print(name, imports, moments)
    for index, moment in enumerate(moments):
        number = interrupts.STOP_SIGNALS[index % len(interrupts.STOP_SIGNALS)]
        said = python(AT_AN_IMPORT, str(moment), str(int(number)), *COMMANDS[name])
        assert (said.returncode, said.stderr.strip()) == (130, ""), (moment, number, imports, said)


@pytest.mark.parametrize("source", [IN_A_FINALIZER, TWICE], ids=["in a finalizer", "while unwinding"])
def test_an_interrupt_that_python_would_only_print_ends_the_command(home: Path, source: str) -> None:
    said = python(source)
    assert (said.returncode, said.stdout, said.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_node_processes_begin_loses_none(home: Path, number: signal.Signals) -> None:
    said = python(IN_A_START, str(int(number)), *COMMANDS["run"])
    assert (said.returncode, said.stderr.strip()) == (130, ""), said
    count, *codes = said.stdout.split()
    assert int(count) > 0
    assert codes == ["-9"] * int(count)


def test_a_command_that_was_started_deaf_stays_deaf(home: Path) -> None:
    said = python(
        AT_AN_IMPORT, "20", "2", "version", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout


SCRIPT = Path(sys.executable).with_name("swactor-cli")


@pytest.mark.parametrize("program", [("-m", "swactor_cli"), (str(SCRIPT),)], ids=["module", "script"])
def test_ctrl_c_from_outside_ends_a_command_that_waits(home: Path, program: tuple[str, ...]) -> None:
    """It reads its prompt from a pipe that nobody writes to; before that it opens the pipe's name."""
    prompt = home / "prompt"
    os.mkfifo(prompt)
    command = [sys.executable, *program, "run", str(TINY), "--prompt-file", str(prompt)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process, prompt.open("w"):  # both sides have opened it: the command is there
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out, err.strip()) == (130, "", "")


def test_a_second_interrupt_is_heard_while_something_blocks_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a plug-in; the first is the loop's own."""
    monkeypatch.setattr(interrupts, "STOP_SIGNALS", (signal.SIGUSR1,))
    calls: list[str] = []

    async def block() -> None:
        caught = interrupts.Interrupts()
        caught.catch()
        loop = asyncio.get_running_loop()
        caught.attach(loop, lambda: calls.append("first"), lambda: calls.append("second"))
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        assert calls == ["second"], "before the loop has turned"
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(block(), LONGEST))
    assert calls == ["second", "first"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
