"""NaN and Inf never pass for a small difference: in a weight, a statistic, a field, an output, on either side."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
import pico
from commands import BAD_CHECKPOINT, DIFFERS, Run, assert_refused, runner
from lemonx import fsck
from lemonx.errors import BadCheckpoint
from lemonx.verification import streams
from lemonx.verification.blocks import Moved
from lemonx.verification.check_result import larger
from lemonx.verification.comparison import compared
from lemonx.verification.rounding import tolerance_of
from lemonx_lab.experiments.answer import NOT_REACHED, steps_to

SIZES: dict[str, dict[str, Any]] = {
    "llama-untied": {"width": 96, "depth": 3},
    "bert-mlm": {"width": 96},
    "resnet-basic": {"width": "2x"},
}
# Of each kind of tensor one; no sample reaches the last entry of some.
TENSORS = [
    ("llama-untied", "lm_head.weight", math.nan),
    ("llama-untied", "model.norm.weight", -math.inf),
    ("llama-untied", "model.embed_tokens.weight", math.inf),
    ("bert-mlm", "bert.embeddings.position_embeddings.weight", math.nan),
    ("bert-mlm", "bert.encoder.layer.1.output.LayerNorm.bias", math.nan),
    ("resnet-basic", "resnet.encoder.stages.0.layers.0.layer.0.normalization.running_var", math.nan),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A source and its target."""

    @cache
    def make(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        source = pico.save(pico.PICO[name](), folder / "source")
        return source, lemonx.expand(source, folder / "target", **SIZES[name]).path

    return make


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def damaged(folder: Path, into: Path, tensor: str, value: float, *, certificate: bool = True) -> Path:
    """A copy whose tensor has another last entry."""
    shutil.copytree(folder, into)
    weights = load_file(into / "model.safetensors")
    weights[tensor].view(-1)[-1] = value
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    if not certificate:
        (into / "lemonx.json").unlink(missing_ok=True)
    return into


@pytest.mark.parametrize(("name", "tensor", "value"), TENSORS)
def test_one_entry_of_a_target(
    name: str, tensor: str, value: float, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """With a certificate it breaks a rule; without one the checkpoint is broken, as fsck says."""
    source, target = pair(name)
    layerwise = value is math.inf
    wrong = lemonx.verify(source, damaged(target, tmp_path / "wrong", tensor, value), layerwise=layerwise)
    assert not wrong.passed and f"{tensor}[" in wrong.reason() and f" is {value}" in wrong.reason()
    bare = damaged(target, tmp_path / "bare", tensor, value, certificate=False)
    with pytest.raises(BadCheckpoint, match=rf"bare/model.safetensors': {tensor} holds NaN or Inf"):
        lemonx.verify(source, bare, layerwise=layerwise)
    assert any(f"holds NaN or Inf in {tensor}" in finding.found for finding in fsck(bare).findings)


def test_one_entry_of_a_source(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    source, target = pair("llama-untied")
    wrong = damaged(source, tmp_path / "wrong", "lm_head.weight", math.nan)
    shutil.copytree(target, tmp_path / "bare")
    (tmp_path / "bare" / "lemonx.json").unlink()
    for other in (target, tmp_path / "bare"):
        with pytest.raises(BadCheckpoint, match=r"wrong/model.safetensors': lm_head.weight holds NaN or Inf"):
            lemonx.verify(wrong, other)


def test_a_method_that_is_not_lossless(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """There are no rules to check its tensors by."""
    source, _ = pair("bert-mlm")
    target = lemonx.expand(source, tmp_path / "aki", width=96, method="aki").path
    wrong = damaged(target, tmp_path / "wrong", "bert.embeddings.position_embeddings.weight", math.nan)
    with pytest.raises(BadCheckpoint, match="holds NaN or Inf"):
        lemonx.verify(source, wrong)


@pytest.mark.parametrize("eps", [math.inf, math.nan, "x"])
def test_an_eps_that_is_no_number(eps: Any, run: Run, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    source, target = pair("llama-untied")
    for name, folder in {"source": source, "target": target}.items():
        shutil.copytree(folder, tmp_path / name)
        content = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**content, "rms_norm_eps": eps}))
    says = "config.json' has rms_norm_eps = .*: use a small positive number|cannot read config.json .*rms_norm_eps"
    assert_refused(run("expand", "source", "out", "--depth", 3), BAD_CHECKPOINT, says)
    assert_refused(run("verify", "source", target), BAD_CHECKPOINT, says)
    found = run("verify", source, "target")
    assert found.code in (DIFFERS, BAD_CHECKPOINT) and "Traceback" not in found.err
    (tmp_path / "target" / "lemonx.json").unlink()
    assert_refused(run("verify", source, "target"), BAD_CHECKPOINT, says)
    assert run("fsck", "target").code == BAD_CHECKPOINT


@pytest.mark.parametrize(
    ("which", "layerwise"),
    [
        (("wrong", "wrong"), False),
        (("wrong", "wrong"), True),
        (("source", "wrong"), False),
        (("wrong", "source"), False),
    ],
)
def test_outputs_that_overflow(
    which: tuple[str, str], layerwise: bool, run: Run, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """Every weight is finite; what is computed with them is not."""
    source, _ = pair("llama-untied")
    shutil.copytree(source, tmp_path / "source")
    wrong = damaged(source, tmp_path / "wrong", "lm_head.weight", 1e308)
    weights = load_file(wrong / "model.safetensors")
    weights["lm_head.weight"][:] = 1.7e308
    save_file(weights, wrong / "model.safetensors", metadata={"format": "pt"})
    found = run("verify", *which, *(["--layerwise"] if layerwise else []))
    assert found.code == DIFFERS, found
    sides = [side for side, name in zip(("source", "target"), which, strict=True) if name == "wrong"]
    assert f"not finite numbers: {', '.join(f'logits of the {side}' for side in sides)}" in found.out


def test_figures_that_are_nan_fail() -> None:
    nan = math.nan
    assert math.isnan(larger(0.0, nan)) and math.isnan(larger(nan, 0.0)) and larger(1.0, 2.0) == 2.0
    moved = Moved()
    for ratio in (1.0, nan, 1.0):
        moved.see(("layers", 0, 0), torch.tensor([ratio]))
    assert math.isnan(moved.most)
    stream = np.ones((2, 3))
    for bad in (nan, math.inf):
        wrong = stream.copy()
        wrong[0, 0] = bad
        assert streams.difference(stream, wrong, None) == math.inf
        assert streams.difference(wrong, stream, None) == math.inf
    assert tolerance_of(None, None)[0] == 1e-10


def test_a_run_without_a_figure_does_not_reach_the_mark() -> None:
    """Nor is it a point to interpolate from."""
    assert steps_to(1.5, [(100, math.nan)], "lower") == (None, NOT_REACHED)
    assert steps_to(1.5, [(100, math.nan), (400, 1.0)], "lower") == (400, "at most")
    assert steps_to(math.nan, [(100, 1.0)], "lower") == (None, NOT_REACHED)


def test_the_wider_part_of_an_output_counts(tmp_path: Path) -> None:
    """A base model's output is compared by its first entries; none of the others may be NaN."""
    from lemonx.checkpoints import Checkpoint
    from lemonx.verification.running import Outputs

    source = pico.save(pico.PICO["llama-base"](), tmp_path / "source")
    name = ("last_hidden_state", "")
    wide = torch.ones(2, 8, dtype=torch.float64)
    with Checkpoint.open(source) as checkpoint:

        def found(after: torch.Tensor) -> Any:
            runs = [Outputs({name: x}, [], frozenset(), frozenset(), ()) for x in (wide[:, :4], after)]
            return compared(checkpoint, checkpoint, *runs, tolerance=(1e-10, ""))

        assert found(wide).passed
        broken = wide.clone()
        broken[1, 7] = math.nan
        assert not found(broken).passed and "last_hidden_state of the target" in found(broken).reason()
