"""The application that every command registers with. Only what `--help` needs is imported anywhere in this package."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from lemonx import errors
from lemonx.cli.options import parameters, parsed
from lemonx.guards.terminal import be_quiet, print_lines
from lemonx.options.declared import Options

# sysexits.h: an internal software error.
INTERNAL = 70
_EXIT_CODES = {
    0: "done",
    errors.NotVerified.exit_code: "the models differ",
    errors.BadTarget.exit_code: "sizes, options or a recipe that make no sense",
    errors.BadCheckpoint.exit_code: "the checkpoint or the data",
    errors.Refused.exit_code: "not possible without loss, or an unknown architecture",
    errors.BadOutput.exit_code: "the output",
    errors.CannotVerify.exit_code: "this machine cannot find out whether the models differ",
    INTERNAL: "a fault of lemonx itself",
    errors.Stopped.exit_code: "stopped by Ctrl-C",
}


_Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors; the exit code says the rest.")]


class _Application(typer.Typer):
    """An application whose commands take declared options, and can be told to print nothing but errors."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        register = super().command(name, **options)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            # What is parsed is read from the signature, where the fields of options stand in their place.
            own: list[inspect.Parameter] = []
            spread: dict[str, tuple[type[Options], list[str]]] = {}
            hints = get_type_hints(function, include_extras=True)
            for each in inspect.signature(function).parameters.values():
                if isinstance(hint := hints[each.name], type) and issubclass(hint, Options):
                    found = list(parameters(hint))
                    spread[each.name] = (hint, [one.name for one in found])
                    own += found
                else:
                    own.append(each.replace(annotation=hint, kind=each.KEYWORD_ONLY))
            own.append(inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Quiet))

            @functools.wraps(function)
            def command(*, quiet: bool, **given: Any) -> Any:
                be_quiet(quiet)
                for name, (kind, names) in spread.items():
                    given[name] = parsed(kind, {one: given.pop(one) for one in names})
                return function(**given)

            vars(command)["__signature__"] = inspect.Signature(own)
            command.__annotations__ = {one.name: one.annotation for one in own}
            register(command)
            return function

        return decorate


app = _Application(
    name="lemonx",
    help="Lossless model expansion: a trained checkpoint in, a larger one that computes exactly the same function out.",
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in _EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print_lines(f"lemonx {version('lemonx')}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of lemonx and exit."),
    ] = False,
) -> None:
    """Options before the command."""


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table, errors too.")]
