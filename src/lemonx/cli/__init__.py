"""The command line: one module per group of commands, one function per command.

Only what `--help` needs is imported here; the rest is imported when a command runs.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import NoReturn

import typer

# The order in which `lemonx --help` lists the commands.
# isort: off
from lemonx.cli import expansion, inferring, catalogue, fsck, advising  # noqa: F401

# isort: on
from lemonx.cli.app import INTERNAL, app
from lemonx.errors import BadOutput, BadTarget, CannotVerify, LemonxError, Stopped
from lemonx.guards import terminal
from lemonx.guards.others import silenced
from lemonx.options.former import Renamed

# Commands of other packages, which register with the same application.
for _commands in entry_points(group="lemonx.commands"):
    try:
        _commands.load()
    except Exception as _error:
        terminal.complain(f"the commands of {_commands.value} are left out ({type(_error).__name__}: {_error})")


def main() -> None:
    """Run the command line: an error is one line and an exit code, never a traceback."""
    if "_LEMONX_COMPLETE" in os.environ:  # a shell asks, and reads tabs
        app()
    terminal.be_quiet(False)
    atexit.unregister(_not_at_the_end)
    atexit.register(_not_at_the_end)
    try:
        with terminal.guarded(BadOutput.exit_code), silenced(), _former_options_told(), _rarely_collected():
            _main()
    except KeyboardInterrupt:  # while another was being answered
        sys.exit(Stopped.exit_code)


def _not_at_the_end() -> None:
    """Once all is said, Ctrl-C would stop nothing but the interpreter's own end, with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _former_options_told() -> Iterator[None]:
    """A context in which a former spelling of an option is answered with a line that says the present one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=Renamed)
        warnings.showwarning = lambda message, *_, **__: terminal.complain(message)
        yield


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Python looks for cycles rarely: torch and transformers are millions of objects that all stay.

    As often as by default, it takes a sixth of the time that their import takes. As the process ends, it would look
    through all of them once more, for nothing.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _main() -> None:
    try:
        code = app(standalone_mode=False) or 0
        if code == Stopped.exit_code:  # what the parser makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except LemonxError as error:
        _say(error, error.exit_code, error)
    except (KeyboardInterrupt, typer.Abort):
        _say("stopped; nothing is half written", Stopped.exit_code)
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
    except (BrokenPipeError, terminal.NotPrinted):
        raise
    except OSError as error:
        # The machine's trouble, not a mistake in this code: no room for a temporary file, say.
        _say(f"{' '.join(str(error).split())}: check the disk and its permissions", BadOutput.exit_code)
    except MemoryError:
        _out_of_memory()
    except Exception as error:
        # A wrong option or argument, as the parser words it.
        worded = getattr(error, "format_message", None)
        if worded is None:
            _unworded(error)
        if not (message := worded().rstrip(".")):  # no command was given, so the help was shown
            sys.exit(BadTarget.exit_code)
        context = getattr(error, "ctx", None)
        path = context.command_path if context else app.info.name
        _say(f"{message}{' See' if message.endswith('?') else ': see'} `{path} --help`", BadTarget.exit_code)


def _say(what: object, code: int, error: LemonxError | None = None) -> NoReturn:
    """One line for people; with --json the same for programs; and the exit code."""
    terminal.complain(what)
    if "--json" in sys.argv:
        parts = error.as_dict() if error else {"file": None, "found": str(what), "remedy": ""}
        kind = type(error).__name__ if error else None
        terminal.print_json({"error": {"kind": kind, "exit_code": code, **parts}})
    sys.exit(code)


def _out_of_memory() -> NoReturn:
    _say("memory ran out: check the sizes in config.json, or use a larger machine", CannotVerify.exit_code)


def _unworded(error: Exception) -> NoReturn:
    """The last line of defence: a bug in lemonx itself, which no input should be able to reach."""
    from lemonx.models.foreign import is_out_of_memory

    if is_out_of_memory(error):
        _out_of_memory()
    if os.environ.get("LEMONX_DEBUG"):
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    _say(f"a fault of lemonx itself ({what}): please report it, with what LEMONX_DEBUG=1 shows", INTERNAL)
