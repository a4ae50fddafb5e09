"""What must be set before torch is imported, and what many tests share."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forkserver import Server

# Some CPUs advertise AMX and refuse it: bf16 matmul would die with SIGILL. Read when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

DATA = Path(__file__).parent / "data"
# What `lemonx train` imports: two seconds, more than most of the runs that a test starts.
TRAINING = (
    "lemonx_lab.training.run",
    "lemonx_lab.training.trainer",
    "datasets",
    "transformers.models.vit.modeling_vit",
)
# A package among the data registers a family where it is imported, as the search for docstrings would.
collect_ignore = ["data"]


def pytest_configure() -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # What is synced, and before which rename, tests/checkpoints/test_writer.py sees by the calls. To wait for the disk
    # shows nothing more, and takes as long as an expansion of a pico model: 7 calls of 5 ms.
    os.fsync = lambda fd: None
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers are the parallelism


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from sharing import Together

    return Together(config, log)


def pytest_collection_finish() -> None:
    from forkserver import freeze

    # Verification collects garbage: to look through all that is imported each time takes longer than a pico model.
    freeze()


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of trained weights and texts."""
    return DATA


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A pico checkpoint in four shards, made once; tests must not write to it."""
    import faults

    @cache
    def make(name: str = "llama-tied") -> Path:
        return faults.save_sharded(name, tmp_path_factory.mktemp(name) / "source")

    return make


@pytest.fixture(scope="session")
def server(good: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    """What starts real `lemonx` processes quickly; it is itself started when it is first asked for."""
    from forkserver import Server

    @cache
    def make() -> Server:
        output = tmp_path_factory.mktemp("warm") / "out"
        return Server("expand", good(), output, "--depth", 3, modules=TRAINING)

    yield make
    if make.cache_info().currsize:
        make().close()


@pytest.fixture(params=["plain", "compiled"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The inner loops of noise and splits, in both ways: by calls of numpy and torch, and compiled by numba."""
    from lemonx.execution import compiled, kernels

    monkeypatch.setattr(kernels, "_loaded", compiled if request.param == "compiled" else None)
    return request.param


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of docs/make by its name."""
    monkeypatch.syspath_prepend(DATA.parents[1] / "docs" / "make")
    return importlib.import_module
