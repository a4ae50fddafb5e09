"""The command line: one module per group of commands, one function per command.

Only what `--help` needs is imported here; the rest is imported when a command runs.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

# The order in which `lemonx --help` lists the commands.
# isort: off
from lemonx.cli import expansion, catalogue, fsck, training, experiments  # noqa: F401

# isort: on
from lemonx.cli.app import app
from lemonx.errors import BadOutput, CannotVerify, LemonxError
from lemonx.guards import terminal

# sysexits.h: an internal software error.
INTERNAL = 70


def main() -> None:
    """Run the command line: an error is one line and an exit code, never a traceback."""
    with terminal.guarded():
        _main()


def _main() -> None:
    try:
        code = app(standalone_mode=False) or 0
        if code == 130:  # what the parser makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except LemonxError as error:
        terminal.complain(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        terminal.complain("stopped; nothing was written")
        sys.exit(130)
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
    except BrokenPipeError:
        raise
    except OSError as error:
        # The machine's trouble, not a mistake in this code: no room for a temporary file, say.
        terminal.complain(f"{' '.join(str(error).split())}: check the disk and its permissions")
        sys.exit(BadOutput.exit_code)
    except MemoryError:
        _out_of_memory()
    except Exception as error:
        # A wrong option or argument, as the parser words it.
        worded = getattr(error, "format_message", None)
        if worded is None:
            _unworded(error)
        terminal.complain(f"{worded().rstrip('.')}: see `lemonx --help`")
        sys.exit(2)


def _out_of_memory() -> NoReturn:
    terminal.complain("memory ran out: check the sizes in config.json, or use a larger machine")
    sys.exit(CannotVerify.exit_code)


def _unworded(error: Exception) -> NoReturn:
    """The last line of defence: a bug in lemonx itself, which no input should be able to reach."""
    from lemonx.models.foreign import is_out_of_memory

    if is_out_of_memory(error):
        _out_of_memory()
    if os.environ.get("LEMONX_DEBUG"):
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    terminal.complain(f"a fault of lemonx itself ({what}): please report it, with what LEMONX_DEBUG=1 shows")
    sys.exit(INTERNAL)
