"""Functions that take options as keywords: the fields of a class of options, which an editor completes."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_type_hints, overload

from lemonx.options.declared import Options, declared
from lemonx.options.former import present

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
Asked = TypeVar("Asked", bound=Options, covariant=True)


class _Decorator(Protocol[P, Asked]):
    """Turns the last parameter of a function, the options, into their fields as keywords."""

    @overload
    def __call__(self, function: Callable[[A, Asked], R]) -> Callable[Concatenate[A, P], R]: ...
    @overload
    def __call__(self, function: Callable[[A, B, Asked], R]) -> Callable[Concatenate[A, B, P], R]: ...
    @overload
    def __call__(self, function: Callable[..., R]) -> Callable[..., R]: ...


def keywords(options: Callable[P, Asked]) -> _Decorator[P, Asked]:
    """Return a decorator for a function whose last parameter is `options`: it takes their fields as keywords."""
    kind = cast("type[Options]", options)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(function).parameters.values())[:-1]
        mine, known = {each.name for each in own}, list(declared(kind))

        @functools.wraps(function)
        def with_keywords(*arguments: Any, **given: Any) -> Any:
            chosen = present({name: value for name, value in given.items() if name not in mine}, known)
            for name in chosen:
                if name not in known:
                    near = "".join(f": did you mean {word!r}?" for word in difflib.get_close_matches(name, known, 1))
                    raise TypeError(f"{function.__name__}() has no option {name!r}{near}")
            rest = {name: value for name, value in given.items() if name in mine}
            return function(*arguments, **rest, options=kind(**chosen))

        types = get_type_hints(kind)
        keywords = [each.replace(annotation=types[name]) for name, each in inspect.signature(kind).parameters.items()]
        vars(with_keywords)["__signature__"] = inspect.Signature([*own, *keywords])
        with_keywords.__doc__ = f"{inspect.getdoc(function)}\n\n{described(kind)}"
        return with_keywords

    return cast("_Decorator[P, Asked]", decorate)


def described(options: type[Options]) -> str:
    """Return the options and their help texts as a section of a docstring."""
    texts = {name: text for name, (_, text) in declared(options).items() if text is not None}
    return "Options:\n" + "\n".join(f"    {name}: {text.text}" for name, text in texts.items())
