"""`lemonx architectures --why`: what a checkpoint lacks, against its own family or the nearest one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import pico
from lemonx.checkpoints import Checkpoint
from lemonx.diagnostics.why import Diagnosis, diagnose
from lemonx.errors import BadCheckpoint, UnknownArchitecture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pico.save(pico.PICO["llama-tied"](), tmp_path / "llama")


def diagnosis(folder: Path) -> Diagnosis:
    with Checkpoint.open(folder) as checkpoint:
        return diagnose(checkpoint)


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_supported_checkpoint_lacks_nothing(folder: Path) -> None:
    found = diagnosis(folder)
    assert found.reason is None and found.known
    assert found.covered == found.tensors > 0
    assert found.without_row == found.without_tensor == ()


def test_an_unknown_type_is_compared_with_all(folder: Path) -> None:
    edit_config(folder, model_type="unheard_of")
    found = diagnosis(folder)
    assert not found.known and isinstance(found.reason, UnknownArchitecture) and "'unheard_of'" in found.reason.found
    assert found.covered == found.tensors and not found.without_row and not found.without_tensor


def test_tensors_without_a_row_are_named_once(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for i in (0, 1):
        weights[f"model.layers.{i}.adapter.weight"] = weights.pop(f"model.layers.{i}.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors")
    found = diagnosis(folder)
    assert found.known and found.family == "llama"
    assert found.without_row == ("model.layers.*.adapter.weight",)
    assert found.without_tensor == ("model.layers.*.mlp.up_proj",)
    assert found.reason and "adapter" in found.reason.found
    assert found.covered == found.tensors - 2


def test_a_config_without_sizes(folder: Path) -> None:
    edit_config(folder, hidden_size="wide")
    assert "hidden_size" in str(diagnosis(folder).reason) or "makes no sense" in str(diagnosis(folder).reason)
    edit_config(folder, model_type=None)
    with pytest.raises(BadCheckpoint, match="model_type"):
        diagnosis(folder)
