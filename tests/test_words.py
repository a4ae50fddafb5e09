"""Words of the row language for vision and state-space models, each against what torch computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lemonx
import pico
from lemonx.errors import Refused
from lemonx.modules import Typed, Vector, scale
from lemonx.operators import KEEP, SILENT
from lemonx.vectors import AVG, WEIGHED, expansion, identity


def typed(row: Any, suffix: str, *expansions: Any) -> Typed:
    """A tensor of a row that reads and writes these."""
    reads, writes = expansions
    axes = row.tensors()[suffix]
    return Typed(reads, writes, tuple(writes if axis.side == row.writes else identity(1) for axis in axes))


# ----------------------------------------------------------------- a scale for every channel


def test_a_scale_writes_a_mean_where_its_branch_is_weighed() -> None:
    row = scale("branch -> stream", "gamma")
    assert list(row.tensors()) == ["gamma"]
    row.require(expansion("scaled", 4, 6), expansion("avg", 4, 6))
    row.require(expansion("scaled", 4, 8), expansion("avg", 4, 8))
    with pytest.raises(Refused, match=r"scale for every channel turns branch into stream.*try 8"):
        row.require(expansion("zero", 4, 6), expansion("avg", 4, 6))


def test_a_scale_is_copied_levelled_and_silenced() -> None:
    row = scale("branch -> stream")
    branch, stream = expansion("scaled", 4, 6), expansion("avg", 4, 6)
    how = row.recipe("", typed(row, "", branch, stream), KEEP)
    assert isinstance(how, Vector) and how.levelled and how.constant is None
    assert (how.factor == 1).all()
    gained = row.recipe("", typed(row, "", branch, stream.with_gain(3.0)), KEEP)
    assert isinstance(gained, Vector) and (gained.factor == 3).all()
    silent = row.recipe("", typed(row, "", branch, stream), SILENT)
    assert isinstance(silent, Vector) and silent.constant == 0.0


@pytest.mark.parametrize("zeros", [False, True])
def test_a_weighed_mean_and_its_scale_make_the_mean(zeros: bool, tmp_path: Path) -> None:
    """On disk: new rows of a branch, times their new factors, are the mean of the scaled rows."""
    from safetensors.torch import load_file, save_file

    folder = pico.save(pico.PICO["dinov2-cls"](), tmp_path / "source")
    old, layer = load_file(folder / "model.safetensors"), "dinov2.encoder.layer.0"
    if zeros:  # a branch that is switched off stays so
        old[f"{layer}.layer_scale2.lambda1"].zero_()
        save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    made = lemonx.plan(folder, width=72)
    assert made.types.spaces["computed"].has(WEIGHED) and made.types.spaces["residual"].has(AVG)
    new = load_file(lemonx.expand(folder, tmp_path / "target", width=72) / "model.safetensors")
    for suffix in ("weight", "bias"):
        before, after = (
            torch.einsum("r,r...->r...", file[f"{layer}.layer_scale2.lambda1"], file[f"{layer}.mlp.fc2.{suffix}"])
            for file in (old, new)
        )
        columns = before.shape[1:]
        if columns:
            copies = torch.from_numpy(made.types.spaces["hidden"].source)
            after = torch.zeros(72, 96).double().index_add_(1, copies, after)
        assert torch.allclose(after[:48], before, atol=1e-12)
        assert torch.allclose(after[48:], before.mean(0).expand(24, *columns), atol=1e-12)
    factor = new[f"{layer}.layer_scale1.lambda1"]
    assert torch.allclose(factor[48:], old[f"{layer}.layer_scale1.lambda1"].square().mean().sqrt().expand(24))
