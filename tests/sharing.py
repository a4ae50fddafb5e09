"""Which tests one worker runs together: those that share something which takes time to make.

xdist's own groups do nothing from pytest 9.2 on: they are written into names that pytest then does not use.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
# Files whose cases stand on a model each, by which the brackets of their names begin.
BY_MODEL = frozenset({"tests/test_families.py", "tests/inference/test_unknown_types.py"})


def together(nodeid: str, root: Path = ROOT) -> str:
    """The name of what a test is run with: itself, its file where that has a fixture of its own, or its model.

    >>> together("tests/test_families.py::test_the_function_is_kept[gpt2-lm:width-96]")
    'tests/test_families.py[gpt2-lm'
    >>> together("tests/test_distributed.py::test_stages_of_size")
    'tests/test_distributed.py'
    >>> together("tests/test_words.py::test_a")
    'tests/test_words.py::test_a'
    """
    file, _, name = nodeid.partition("::")
    if file in BY_MODEL and (model := re.search(r"\[[^:\]]+(?=:)|\[[^-\]]+", name)):
        return file + model[0]
    return file if _has_fixture(root / file) else nodeid


@cache
def _has_fixture(file: Path) -> bool:
    """Whether the tests of a file share a fixture, which every worker would make again."""
    return 'scope="module"' in file.read_text()


class Together(LoadScopeScheduling):
    """Hands out work by `together`; where most tests are, first, so that what is left in the end is small."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid, self.config.rootpath)
