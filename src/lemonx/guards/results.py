"""The base class of public results: in Python and in a notebook they show what the command line prints."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

_RENDER = "lemonx.cli.render"


class Result:
    """A result whose `repr` is what the command line prints, and which is a table in a notebook.

    A subclass names its `printer`, a module and a function of cli/render. Only they need rich, so they are imported
    once a result is shown. A dataclass is to be made with `repr=False`.
    """

    _printer: ClassVar[str]

    def __init_subclass__(cls, *, printer: str, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls._printer = printer

    def _shown(self, how: str) -> str:
        module, _, name = self._printer.partition(":")
        out = getattr(import_module(f"{_RENDER}.console"), how)()
        getattr(import_module(f"{_RENDER}.{module}"), name)(self, out)
        return out.content

    def __repr__(self) -> str:
        return self._shown("TextOut")

    def _repr_html_(self) -> str:
        return self._shown("HtmlOut")
