"""The source code of the Python standard library as a corpus: real text that every machine has."""

from __future__ import annotations

import functools
import re
import sysconfig
from pathlib import Path

import numpy as np
from pydantic import Field

from lemonx.errors import BadData
from lemonx.guards.limits import LONGEST_TEXT
from lemonx.training.strict import Strict
from lemonx_lab.data import Prepared
from lemonx_lab.data.model import Model
from lemonx_lab.data.splitting import split
from lemonx_lab.data.vocabulary import BYTES
from lemonx_lab.data.windows import language

# Tests, what was installed beside the library, and what the machine's build wrote into it.
_LEFT_OUT = re.compile(
    r"tests?|idle_test|(site|dist)-packages|__pycache__|config-.*|_sysconfigdata.*|sitecustomize\.py"
)
# ASCII's own "substitute": what stands for every byte that is not ASCII.
SUBSTITUTE = 0x1A
_TABLE = bytes(byte if byte < 128 else SUBSTITUTE for byte in range(256))


class Options(Strict):
    length: int = Field(64, ge=8, le=LONGEST_TEXT)
    validation_examples: int | None = Field(256, ge=1)


@functools.cache
def sources(root: Path | None = None) -> dict[str, bytes]:
    """The library's modules by path, as ASCII."""
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    kept = sorted(name for name in paths if not any(_LEFT_OUT.fullmatch(part) for part in name.split("/")))
    if not kept:
        raise BadData(
            "has no source of the standard library", "use a Python that has it, or data of kind text", file=root
        )
    return {name: paths[name].read_bytes().translate(_TABLE) for name in kept}


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """Windows of the library's bytes; whole modules are held out for validation."""
    files = sources()
    train, validation = split(list(files), list(files.values()))
    return language(
        task,
        np.frombuffer(b"".join(train), np.uint8),
        np.frombuffer(b"".join(validation), np.uint8),
        length=options.length,
        vocabulary=BYTES,
        seed=seed,
        limit=options.validation_examples,
        where="stdlib",
    )
