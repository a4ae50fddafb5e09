"""A process of its own: a checkpoint's outputs in a given dtype, on the sample that verification uses."""

from __future__ import annotations

import sys
from pathlib import Path


def main(path: str, dtype: str, seed: str, file: str) -> None:
    import torch
    from safetensors.torch import save_file

    from lemonx.verification.loading import floating_outputs, load, sample
    from lemonx.verification.outputs import running

    model, _ = load(Path(path), getattr(torch, dtype))
    with running(Path(path)):
        outputs = floating_outputs(model, sample(model, int(seed)))
    save_file({name: value.contiguous() for name, value in outputs.items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
