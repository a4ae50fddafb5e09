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
# What else tests may share.
SERVER, MODULE = "server", "module"


def together(nodeid: str, root: Path = ROOT) -> str:
    """The name of what a test is run with, by what it shares: nothing, its file's fixture, its model, or a server.

    >>> together("tests/test_families.py::test_the_function_is_kept[gpt2-lm:width-96]")
    'tests/test_families.py[gpt2-lm'
    >>> together("tests/test_distributed.py::test_stages_of_size")
    'tests/test_distributed.py'
    >>> together("tests/test_attacks.py::test_an_attack[a]") == together("tests/test_faults_disk.py::test_a_full_disk")
    True
    >>> together("tests/test_words.py::test_a")
    'tests/test_words.py::test_a'
    """
    file, _, name = nodeid.partition("::")
    if file in BY_MODEL and (model := re.search(r"\[[^:\]]+(?=:)|\[[^-\]]+", name)):
        return file + model[0]
    return {SERVER: SERVER, MODULE: file}.get(_shared(root / file), nodeid)


@cache
def _shared(file: Path) -> str:
    """What the tests of a file share, which every worker would make again: a server of processes, or a fixture."""
    text = file.read_text()
    if "server: Callable[[]" in text:
        return SERVER
    return MODULE if 'scope="module"' in text else ""


class Together(LoadScopeScheduling):
    """Hands out work by `together`; where most tests are, first, so that what is left in the end is small."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid, self.config.rootpath)
