"""The causes of a result besides its settings: the code that computes it, and the libraries it uses.

Only code that runs counts. Comments and docstrings do not, so that better prose does not train everything again. A
change that affects growth alone leaves trained sources valid.
"""

from __future__ import annotations

import ast
import hashlib
import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from lemonx.checkpoints.opening import open_file

SOURCES = Path(__file__).parents[2]
# The rooms that make a target, and those that train a model.
GROWTH = (
    *(f"lemonx/{room}" for room in ("algebra", "architectures", "execution", "frames", "methods", "models")),
    *("lemonx/options", "lemonx/planning", "lemonx/specs", "lemonx_lab/data", "lemonx_lab/rivals"),
)
TRAINING = ("lemonx/models", "lemonx/training", "lemonx_lab/data", "lemonx_lab/training")
_BLOCK = 2**20


@cache
def fingerprint(rooms: tuple[str, ...]) -> dict[str, str]:
    """A digest of the code in these rooms, and the versions of its libraries.

    Python's is among them: its standard library is the data of some experiments.
    """
    digest = hashlib.sha256()
    for path in sorted(path for room in rooms for path in (SOURCES / room).rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCES)}\n{as_it_runs(path.read_bytes())}\n".encode())
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"code": digest.hexdigest(), "python": platform.python_version(), **libraries}


@cache
def files(path: Path) -> str:
    """A digest of a file, or of all files of a folder and their names: other data make another result."""
    digest = hashlib.sha256()
    for one in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
        digest.update(f"{one.relative_to(path)}\0{one.stat().st_size}\n".encode())
        # An unreadable file is no data either: training says so, in its own words.
        with suppress(OSError), open_file(one) as content:
            while block := content.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def as_it_runs(source: str | bytes) -> str:
    '''The code without what does not run.

    >>> as_it_runs('def f():\\n    """One."""\\n    return 1  # one') == as_it_runs("def f(): return 1")
    True
    '''
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(line: object) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
