"""Stores of other packages are read like lemonx's own, and what every store must do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lemonx
import pico
from lemonx.checkpoints import Checkpoint, creating, reader, temporary, writer
from lemonx.errors import BadCheckpoint
from test_store_digests import SOURCES

PACKAGE = Path(__file__).parents[1] / "data" / "npz_store" / "lemonx_npz.py"
GROW: dict[str, Any] = {"width": 72, "heads": 6, "kv_heads": 3, "depth": 3}


def install(folder: Path, name: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves of a package with this function in the entry point group."""
    made = folder / "site" / f"{name}-0.1.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (made / "entry_points.txt").write_text(f"[lemonx.stores]\n{name} = {function}\n")
    monkeypatch.syspath_prepend(folder / "site")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose weights are in weights.npz, beside the same one in safetensors."""
    pico.save(pico.PICO["llama-tied"](), tmp_path / "source", torch.float32)
    shutil.copytree(tmp_path / "source", tmp_path / "npz", ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(tmp_path / "source" / "model.safetensors")
    np.savez(tmp_path / "npz" / "weights.npz", **{name: tensor.numpy() for name, tensor in weights.items()})
    return tmp_path / "npz"


def test_a_package_brings_a_store(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadCheckpoint, match=r"holds neither model\.safetensors"):
        lemonx.plan(folder, **GROW)
    install(tmp_path, "npz_store", "lemonx_npz:opened", monkeypatch)
    shutil.copy(PACKAGE, tmp_path / "site")
    made = lemonx.expand(folder, tmp_path / "out", **GROW)
    assert made.verified.proven and made.certificate.source.converted == "numpy's arrays"
    assert lemonx.verify(folder, made, layerwise=True).passed
    lemonx.expand(tmp_path / "source", tmp_path / "expected", verify=False, **GROW)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert all(found[name].equal(tensor) for name, tensor in expected.items()) and found.keys() == expected.keys()
    with Checkpoint.open(folder) as checkpoint, Checkpoint.open(tmp_path / "source") as plain:
        name = "model.layers.0.mlp.up_proj.weight"
        assert checkpoint.read(name, 3, 7, columns=range(5, 9)).equal(plain.read(name)[3:7, 5:9])


def test_a_package_that_fails_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken_store", "lemonx_broken:opened", monkeypatch)
    with pytest.raises(BadCheckpoint, match=r"cannot be read by the store 'broken_store' \(.*lemonx_broken") as caught:
        lemonx.plan(folder, **GROW)
    assert "\n" not in str(caught.value)
    assert lemonx.plan(tmp_path / "source", **GROW).steps


@pytest.mark.parametrize("name", ["8 bits, blocks", "pickle", "GGUF, llama", "adapter, merged", "DCP"])
def test_verification_block_by_block_copies_no_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options = SOURCES[name]
    source = make(tmp_path)
    made = lemonx.expand(source, tmp_path / "out", **options)
    monkeypatch.setattr(reader, "copy_weights", None)
    allowed = {key: options[key] for key in ("allow_pickle",) if key in options}
    found = lemonx.verify(source, made, layerwise=True, **allowed)
    assert found.passed and found.outputs is not None


def test_a_module_grows_without_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    for module, name in ((temporary, "make_folder"), (writer, "claim"), (creating, "_create")):
        monkeypatch.setattr(module, name, made.append)
    small, large = (nn.Sequential(nn.Linear(5, n), nn.ReLU(), nn.Linear(n, 3)) for n in (4, 8))
    assert lemonx.grow(small, large, torch.randn(4, 5)).algebra.passed and not made
