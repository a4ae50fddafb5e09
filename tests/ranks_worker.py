"""What each process that torchrun starts does for test_ranks.py: expand, and note how much it wrote to which file."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lemonx

WRITTEN = Counter[str]()


def counted(write: Any) -> Any:
    def counting(fd: int, *given: Any) -> int:
        count = write(fd, *given)
        WRITTEN[Path(os.readlink(f"/proc/self/fd/{fd}")).name] += count
        return count

    return counting


if __name__ == "__main__":
    os.pwrite, os.pwritev = counted(os.pwrite), counted(os.pwritev)
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    try:
        made = lemonx.expand(folder / "run", folder / "out", **options)
        said = str(made.verified.proven)
    except lemonx.LemonxError as error:
        said = str(error)
    (folder / f"wrote-{os.environ['RANK']}.json").write_text(json.dumps({"files": WRITTEN, "said": said}))
