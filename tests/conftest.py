"""What must be set before torch is imported, and where the real weights are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Some CPUs advertise AMX and refuse it: bf16 matmul would die with SIGILL. Read when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REAL = Path(__file__).resolve().parents[2] / "shared" / "real"


def pytest_configure() -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers are the parallelism


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of real weights and data, `shared/real` beside the repository."""
    if not REAL.is_dir():
        pytest.skip(f"no real weights here: {REAL} does not exist")
    return REAL
