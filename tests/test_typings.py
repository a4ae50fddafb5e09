"""The stubs of transformers that pyright reads: every name in them is in the installed package."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TYPINGS = Path(__file__).parents[1] / "typings"
STUBS = sorted(TYPINGS.rglob("*.pyi"))


def _module(stub: Path) -> str:
    return ".".join(stub.relative_to(TYPINGS).with_suffix("").parts).removesuffix(".__init__")


def _missing(text: str, name: str) -> Iterator[str]:
    """What a stub declares and the module of this name does not have."""
    module: Any = importlib.import_module(name)
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign | ast.FunctionDef | ast.ClassDef):
            name = node.target.id if isinstance(node, ast.AnnAssign) else node.name  # type: ignore[union-attr]
            if name.startswith("_") and name != "__version__":  # a base that several public classes share in the stub
                continue
            if not hasattr(module, name):
                yield name
            elif isinstance(node, ast.FunctionDef):
                yield from _parameters(node, getattr(module, name))
            elif isinstance(node, ast.ClassDef):
                yield from _methods(node, getattr(module, name))


def _methods(stub: ast.ClassDef, kind: type) -> Iterator[str]:
    for node in stub.body:
        if isinstance(node, ast.FunctionDef) and node.name not in ("__getattr__", "__setattr__", "__post_init__"):
            found = inspect.getattr_static(kind, node.name, None)
            if found is None:
                yield f"{stub.name}.{node.name}"
            elif not isinstance(found, property):
                yield from _parameters(node, getattr(kind, node.name), stub.name)


def _parameters(stub: ast.FunctionDef, function: Any, within: str = "") -> Iterator[str]:
    """Parameters that the function does not take by the stub's name."""
    taken = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    for argument in (*stub.args.args, *stub.args.kwonlyargs):
        if argument.arg not in ("self", "cls", *taken):
            yield f"{within}.{stub.name}({argument.arg})"


@pytest.mark.parametrize("stub", STUBS, ids=_module)
def test_a_stub_names_what_is_there(stub: Path) -> None:
    assert list(_missing(stub.read_text(), _module(stub))) == []


def test_a_name_that_is_gone_would_be_noticed() -> None:
    text = "ACT3FN: int\nclass ClippedGELUActivation:\n    def backwards(self) -> None: ...\n"
    assert list(_missing(text, "transformers.activations")) == ["ACT3FN", "ClippedGELUActivation.backwards"]
