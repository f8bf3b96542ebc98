"""Where the process begins: Ctrl-C and its kin end it with 130, without a traceback, from the first line on.

An exception that comes in the middle of an import may be printed by the import system, turned into another
or lost; nothing is begun by then that would need an end in order. So an interrupt that meets an import ends
the process on the spot, and any other is a KeyboardInterrupt that unwinds. On guard once it is imported, and
imports nothing before that which the interpreter has not loaded itself. Knows no command.
"""

import os
import sys
from _signal import (  # type: ignore[import-not-found]  # what `signal` puts enums around
    SIG_DFL,
    SIG_IGN,
    SIGHUP,
    SIGINT,
    SIGTERM,
    default_int_handler,
    getsignal,
    signal,
)

INTERRUPTED = 130
_STOP_SIGNALS = (SIGINT, SIGTERM, SIGHUP)
_OF_MEMORY = ("annot allocate memory", "failed to map segment")  # of the kernel, of the dynamic linker
_IMPORTER = "<frozen importlib._bootstrap>"
_unwinds = False


def _end_at_once() -> None:
    terminal = sys.modules.get("swactor_cli.terminal")
    if terminal is not None and hasattr(terminal, "show_cursor"):  # it may be half imported
        terminal.show_cursor()
    os._exit(INTERRUPTED)


def _interrupted(number, frame):  # type: ignore[no-untyped-def]  # the types would have to be imported
    while _unwinds and frame is not None and frame.f_code.co_filename != _IMPORTER:
        frame = frame.f_back
    if _unwinds and frame is None:
        raise KeyboardInterrupt
    _end_at_once()


def _unraisable(error):  # type: ignore[no-untyped-def]  # as above
    """An interrupt that came where Python can only print it, as in a finalizer, has not unwound anything."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        _end_at_once()
    sys.__unraisablehook__(error)


def _guard() -> None:
    """A command that was started deaf to Ctrl-C, as a shell starts those in the background, stays so."""
    for number in _STOP_SIGNALS:
        if getsignal(number) in (default_int_handler, SIG_DFL):
            signal(number, _interrupted)


_guard()


def main() -> None:
    """The command line, to its exit code as SystemExit."""
    global _unwinds
    sys.unraisablehook = _unraisable
    import gc

    # What imports make stays: going over it again and again is a twentieth of a start.
    gc.set_threshold(50_000)
    try:
        from swactor_cli.app import main as command
    except (MemoryError, SystemError, OSError, ImportError) as error:  # the usual way to say it is not in
        lacks = isinstance(error, (MemoryError, SystemError))  # C code has not always said which
        if not lacks and not any(word in str(error) for word in _OF_MEMORY):
            raise
        os.write(2, b"error: there is not enough memory to start\nhint: raise `ulimit -v` and `ulimit -d`\n")
        os._exit(1)

    try:
        _unwinds = True
        command()
    except KeyboardInterrupt:  # in the middle of saying what the first one ended
        _end_at_once()
    finally:
        _unwinds = False
        for number in _STOP_SIGNALS:  # the exit code stands, nothing is left to stop
            signal(number, SIG_IGN)
