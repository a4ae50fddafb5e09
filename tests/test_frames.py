"""Frames: what the solver finds has the properties that make it lossless, and what it cannot find is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lemonx
import pico
from lemonx.checkpoints import Checkpoint
from lemonx.errors import Refused
from lemonx.execution.runner import run_plan
from lemonx.frames import construction
from lemonx.planning.exactness import ROUNDED
from lemonx.planning.notices import notes

# Every property is a sum of products of a few numbers of order one: rounding leaves some 1e-15.
TINY = 1e-12
SIZES = [(48, 72), (48, 60), (48, 64), (48, 120), (32, 80), (40, 60), (66, 99), (50, 75), (144, 216)]


def layer_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def assert_carries(gain: np.ndarray, target: int) -> construction.Feeder:
    """The frame of these gains is tight, is read by any LayerNorm, and is what a LayerNorm with its gains writes."""
    found = construction.feeder(gain, target)
    size, rho = len(gain), target / len(gain)
    a, back = found.stream.forth.columns(0, target), found.stream.back
    assert back is not None
    assert np.abs(a.T @ a - rho * np.eye(size)).max() < TINY and np.abs(a.sum(1) - 1).max() < TINY
    assert np.abs(back.rows(0, size) @ a - np.eye(size)).max() < TINY
    x, eps = np.random.default_rng(1).standard_normal((7, size)), 1e-2
    assert np.abs(layer_norm(x @ a.T, eps) - layer_norm(x, eps) @ a.T).max() < TINY
    written = layer_norm(x @ found.inputs.forth.columns(0, target).T, eps) * found.gains
    assert np.abs(written - (layer_norm(x, eps) * gain) @ a.T).max() < TINY * found.spread
    return found


@pytest.mark.parametrize(("size", "target"), SIZES)
def test_a_frame_is_what_a_layer_norm_can_write(size: int, target: int) -> None:
    assert_carries(0.5 + np.random.default_rng(size).random(size), target)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0.3, 3.0), min_size=12, max_size=12))
def test_whatever_the_gains_are(gain: list[float]) -> None:
    try:
        assert_carries(np.array(gain), 18)
    except Refused as refusal:  # a start that fails is said, never written
        assert "no change of basis was found" in str(refusal)


@pytest.mark.parametrize("gain", [np.ones(12), np.full(12, -0.7)], ids=["ones", "negative"])
def test_equal_gains_take_any_frame(gain: np.ndarray) -> None:
    assert assert_carries(gain, 18).spread == pytest.approx(1.0)


@pytest.mark.parametrize(("size", "target"), [(4, 6), (48, 49), (48, 52), (36, 54), (50, 75)])
def test_what_no_norm_feeds_takes_a_frame_of_any_size(size: int, target: int) -> None:
    a = construction.any_frame(size, target).stream.forth.columns(0, target)
    assert np.abs(a.T @ a - target / size * np.eye(size)).max() < TINY and np.abs(a.sum(1) - 1).max() < TINY


def test_it_is_the_same_every_time() -> None:
    gain = 0.5 + np.random.default_rng(0).random(24)
    first = construction.feeder(gain, 36)
    construction._feed.cache_clear()
    second = construction.feeder(gain, 36)
    assert second is not first and np.array_equal(first.gains, second.gains)
    assert np.array_equal(first.stream.forth.columns(0, 36), second.stream.forth.columns(0, 36))


def test_blocks_are_the_matrix_they_stand_for() -> None:
    """Along columns, along rows in any pieces, and dense: one matrix."""
    gain = 0.5 + np.random.default_rng(0).random(50)  # its last group is larger
    blocks = construction.feeder(gain, 75).inputs.forth
    dense = torch.from_numpy(blocks.columns(0, 75))
    x = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(blocks.along_columns(x), x @ dense.T, rtol=0, atol=TINY)
    tall = x.T.contiguous()
    scratch = torch.empty(1, 9, dtype=torch.float64)

    def read(start: int, stop: int) -> torch.Tensor:
        return scratch.copy_(tall[start:stop])  # valid until the next row is read

    for start, stop in ((0, 75), (0, 4), (5, 31), (70, 75)):
        rows = blocks.along_rows(read, lambda: tall.mean(0), start, stop)
        torch.testing.assert_close(rows, dense[start:stop] @ tall, rtol=0, atol=TINY)
    np.testing.assert_array_equal(np.vstack([blocks.columns(0, 7), blocks.columns(7, 75)]), blocks.columns(0, 75))


@pytest.mark.parametrize(("size", "target"), [(48, 50), (48, 49), (6, 8), (2, 3), (768, 770)])
def test_what_has_too_little_freedom_is_refused_with_widths_that_have(size: int, target: int) -> None:
    with pytest.raises(Refused, match="try") as caught:
        construction.group_sizes(size, target)
    for word in str(caught.value).split("try ")[1].split(" or "):
        if word.isdigit():
            construction.group_sizes(size, int(word))


@pytest.mark.parametrize(
    ("target", "small"),
    [(72, small) for small in (0.0, 1e-33, -1e-20, 1.5e-9, 1e-6, -1e-4, 1e-3)] + [(60, 0.0), (60, 1.5e-9), (120, 0.0)],
)
def test_gains_near_zero_are_carried_as_they_are(target: int, small: float) -> None:
    rng = np.random.default_rng(0)
    gain = 0.3 + rng.random(48)
    gain[rng.choice(48, 4, replace=False)] = small * (1 + rng.random(4))
    found = assert_carries(gain, target)
    assert np.count_nonzero(found.gains) == target - 4 * (small == 0)


def test_gains_near_zero_of_all_sizes_at_once() -> None:
    gain = 0.3 + np.random.default_rng(1).random(48)
    gain[[3, 11, 12, 40, 41, 47]] = 0.0, 4.8e-33, 6e-33, 1.5e-9, -2e-6, 1e-3
    assert_carries(gain, 72)


def test_a_norm_that_writes_its_bias_alone_is_carried() -> None:
    assert not assert_carries(np.zeros(12), 18).gains.any()


def test_more_gains_near_zero_than_there_is_room_for_are_refused() -> None:
    gain = 0.3 + np.random.default_rng(0).random(48)
    gain[:30] = 0.0
    with pytest.raises(Refused, match=r"30 of which are near 0.*try another width"):
        construction.feeder(gain, 72)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0.3, 3.0), min_size=12, max_size=12))
def test_the_gains_of_a_frame_are_about_the_sources(gain: list[float]) -> None:
    """What a norm multiplies, rounding and gradients, it multiplies as the source's does."""
    found = construction.feeder(np.array(gain), 18)
    assert np.abs(found.gains).max() <= 3 * max(gain)


def test_a_frame_that_amplifies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "LIMIT", 1.0)
    with pytest.raises(Refused, match="would amplify rounding and gradients"):
        construction.feeder(0.5 + np.random.default_rng(0).random(12), 18)


@pytest.mark.parametrize(("size", "target"), [(48, 72), (48, 120)])
def test_another_machines_rounding_finds_the_same_frame(size: int, target: int) -> None:
    """A certificate is checked again by solving again: there, too, the tensors must be those of the frame."""
    rng = np.random.default_rng(0)
    gain = 0.5 + rng.random(size)
    once = construction.feeder(gain, target).stream.forth.columns(0, target)
    again = construction.feeder(gain * (1 + 2e-16 * rng.standard_normal(size)), target).stream.forth.columns(0, target)
    assert 0 < np.abs(once - again).max() < 1e-10


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert-base", {"width": 72}),
        ("bert-cls", {"width": 72}),
        ("bloom", {"width": 72, "depth": 3, "set": {"tie_word_embeddings": False}}),
        ("swin-stages", {"width": 36, "set": {"depths": [1, 4, 2]}}),
        ("albert-mlm", {"width": 72}),
        ("siglip", {"set": {"vision_config.hidden_size": 54}}),
    ],
)
def test_the_result_verifies_also_block_by_block(name: str, options: Any, tmp_path: Path) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", **options).path
    measured = lemonx.verify(source, target, layerwise=True)
    assert measured.passed, measured.reason()
    assert measured.outputs.tolerance == 1e-10 and measured.layers and measured.layers.places
    assert json.loads((target / "lemonx.json").read_text())["verified"]["outputs"]["passed"]


def test_the_plan_names_the_price(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["bert-base"](), tmp_path / "source")
    plan = lemonx.plan(source, width=72, solve=True)
    price, spare, basis = notes(plan)
    assert "takes 3 changes of basis of 8 dense blocks, 9 x 6" in price and "spread over a factor" in price
    assert "96 of the 288 MLP neurons in every layer" in spare
    assert "another basis of 72 coordinates" in basis
    rules = {step.name: step.rule for step in plan.steps}
    assert rules["encoder.layer.0.intermediate.dense.weight"] == "col-frame ∘ row-circ + pass-through"
    assert rules["encoder.layer.0.output.dense.weight"] == "col-circ ∘ row-frame + pass-through"
    assert rules["embeddings.LayerNorm.weight"] == "LayerNorm into a frame"


def test_the_plan_names_the_price_of_every_stream(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["swin-stages"](), tmp_path / "source")
    plan = lemonx.plan(source, width=36, solve=True)
    first, second = notes(plan)
    assert first.startswith("stage0 24 -> 36 takes 1 change of basis of 4 dense blocks") and "spread" in first
    assert second.startswith("stage1 48 -> 72 takes 1 change of basis of 24 dense blocks") and "no norm feeds" in second
    rules = {step.name: step.rule for step in plan.steps}
    assert rules["swin.encoder.layers.0.downsample.reduction.weight"] == "col-frame ∘ row-frame"
    assert rules["swin.encoder.layers.1.downsample.reduction.weight"] == "col-frame ∘ row-avg"
    # Norms over means need another eps, those of a frame the same: the means take a gain, and the field stays.
    assert plan.target_config["layer_norm_eps"] == plan.source_config["layer_norm_eps"]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("times", [1, 4])
def test_a_norm_reads_a_frame_whatever_its_gains_are(times: int, biased: bool) -> None:
    """Also over several vectors, as patch merging does: mean and variance stay, and each quarter has its own gains."""
    rng = np.random.default_rng(0)
    stream = construction.feeder(0.5 + rng.random(12), 18).stream.repeated(times)
    size, wide = 12 * times, 18 * times
    gain, bias = 0.5 + rng.random(size), 3 * rng.standard_normal(size)
    gain[[0, 5, 7]] = 0.0, 1e-33, -1e-6
    written = construction.normed(stream, gain, bias if biased else None, 0.2 + rng.random(wide))
    x, eps = rng.standard_normal((5, size)), 1e-2
    found = layer_norm(x @ stream.forth.columns(0, wide).T, eps) * written.gains + written.bias
    wanted = layer_norm(x, eps) * gain + (bias if biased else 0.0)
    assert written.read.back is not None
    assert np.abs(found @ written.read.back.rows(0, size).T - wanted).max() < TINY
    # Pairs of neurons pass v on, and what they write brings the source's output into any other frame.
    assert written.carried.back is not None
    passed, other = found @ written.carried.back.rows(0, size).T, construction.any_frame(size, wide).stream.forth
    turned = found + passed @ written.turned(other, 0, wide).T
    assert np.abs(turned - wanted @ other.columns(0, wide).T).max() < TINY
    # A weight that reads it is the same, streamed or dense.
    weight = rng.standard_normal((3, size))
    read = written.read.back.along_columns(torch.from_numpy(weight)).numpy()
    assert np.abs(read - weight @ written.read.back.rows(0, size)).max() < TINY


def test_norms_beside_a_frame_leave_it_its_eps(tmp_path: Path) -> None:
    """The norm of embeddings at an indivisible width shares its eps with norms of a frame, which need it as it is."""
    source = pico.save(pico.PICO["electra-cls"](), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-2}))
    target = lemonx.expand(source, tmp_path / "target", width=72, set={"embedding_size": 36}, verify=False).path
    assert lemonx.verify(source, target).outputs.difference < 1e-12


def test_sets_of_weights_for_several_blocks_are_refused_with_a_way_out(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["albert-runs"](), tmp_path / "source")
    with pytest.raises(Refused, match=r"would have to read two different bases: try --width 96$"):
        lemonx.plan(source, width=72, solve=True)
    lemonx.plan(source, width=96)
    apart = lemonx.expand(source, tmp_path / "apart", set={"num_hidden_groups": 4}, verify=False).path
    lemonx.expand(apart, tmp_path / "target", width=72)


@pytest.mark.parametrize("depth_type", [1, 2])
def test_a_post_ln_model_becomes_deeper_and_wider_at_once(depth_type: int, tmp_path: Path) -> None:
    """Up to eps, as without frames: blocks of a group without affine parts keep one frame, and the last turns it."""
    source = pico.save(pico.PICO["bert-cls"](), tmp_path / "source")
    deeper: Any = {"depth": 5, "free": {"depth_type": depth_type}, "verify": False}
    lost = []
    for eps in (1e-12, 1e-5):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"layer_norm_eps": eps}))
        for options in (deeper, deeper | {"width": 72}):
            target = lemonx.expand(source, tmp_path / f"{eps}-{len(options)}", **options).path
            measured = lemonx.verify(source, target, layerwise=True)
            assert measured.passed, measured.reason()
            assert measured.outputs.difference < 1e-13
            lost.append(measured.outputs.output_loss)
    assert max(lost[:2]) < 1e-11
    # What eps costs is the same with and without frames, so frames cost nothing themselves.
    assert lost[3] == pytest.approx(lost[2], rel=1e-3) and lost[2] > 1e-8
    plan = lemonx.plan(source, width=72, depth=5, solve=True)
    steps = {step.name: step for step in plan.steps}
    silent = steps["bert.encoder.layer.4.output.dense.weight"]
    assert silent.rule == "silent: zero + pass-through" and silent.exactness == ROUNDED


def test_a_plan_that_is_looked_at_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says all that a solved one says but for the numbers of its frames; it cannot be run."""
    source = pico.save(pico.PICO["bert-cls"](), tmp_path / "source")
    solved = lemonx.plan(source, width=72, depth=3, solve=True)

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "read", read)
        with pytest.raises(AssertionError, match="a tensor was read"):
            lemonx.plan(source, width=72, depth=3, solve=True)
        outline = lemonx.plan(source, width=72, depth=3)
    facts = [[(s.name, s.source, s.shape, s.dtype, s.rule, s.exactness) for s in p.steps] for p in (outline, solved)]
    assert facts[0] == facts[1] and outline.target_config == solved.target_config
    assert outline.frames is not None and solved.frames is not None
    assert [len(s.feeders) for s in outline.frames.streams] == [len(s.feeders) for s in solved.frames.streams]
    assert any("not solved yet" in note for note in notes(outline))
    with Checkpoint.open(source) as checkpoint, pytest.raises(TypeError, match="solve=True"):
        run_plan(outline, checkpoint, None)  # type: ignore[arg-type]
