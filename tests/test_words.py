"""Words of the row language for vision and state-space models, each against what torch computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lemonx
import pico
from lemonx.algebra.expansions import expansion, identity
from lemonx.algebra.free_parameters import PRESETS
from lemonx.algebra.recipes import KEEP, SILENT, Matrix, Vector
from lemonx.algebra.runs import Fill
from lemonx.errors import Refused
from lemonx.execution.matrix import expand_matrix
from lemonx.planning.typecheck import check
from lemonx.specs.config import Config, with_fields
from lemonx.specs.norms import rms_norm, scale, unit_length
from lemonx.specs.rows import Typed
from lemonx.specs.space_expansions import grouped_expansion
from lemonx.specs.spaces import silent, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import depthwise, linear, parameter


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
    with pytest.raises(Refused, match=r"a scale per channel joins branch and stream.*from 4 to 6: try 8"):
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
    assert made.types.spaces["computed"].is_weighed_mean.any() and made.types.spaces["residual"].is_mean.any()
    new = load_file(lemonx.expand(folder, tmp_path / "target", width=72).path / "model.safetensors")
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


# ----------------------------------------------------------------- depthwise convolutions


def test_a_depthwise_convolution_keeps_channels_in_place() -> None:
    row = depthwise("a -> a", kernel=1)
    for kind in ("circ", "zero", "rand"):
        row.require(expansion(kind, 4, 7), expansion(kind, 4, 7))
    for reads, writes in (("avg", "avg"), ("circ", "zero")):
        with pytest.raises(Refused, match=r"depthwise convolution reads a.*4 -> 7.*try 4|try 8"):
            row.require(expansion(reads, 4, 7), expansion(writes, 4, 7))
    with pytest.raises(Refused, match="depthwise"):
        row.require(expansion("circ", 4, 8).with_gain(2.0), expansion("circ", 4, 8))


@pytest.mark.parametrize("kind", ["circ", "zero"])
def test_a_depthwise_convolution_of_an_expansion_is_the_expansion(kind: str) -> None:
    """What reads zeros may be anything, but its bias must be zero."""
    row, e = depthwise("a -> a", kernel=1), expansion(kind, 4, 7)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).double() for shape in ((2, 4, 9), (4, 1, 3), (4,)))
    how = {}
    for suffix, columns in (("weight", (identity(1), identity(3))), ("bias", ())):
        made = row.recipe(suffix, Typed(e, e, (e, *columns)), KEEP)
        assert isinstance(made, Matrix)
        how[suffix] = made
    new = expand_matrix(weight.reshape(4, 3), how["weight"], PRESETS["language"]).reshape(7, 1, 3)
    shift = expand_matrix(bias.reshape(4, 1), how["bias"], PRESETS["language"]).reshape(7)
    wide = torch.from_numpy(e.expand(x.transpose(1, 2).numpy())).transpose(1, 2)
    before = F.conv1d(x, weight, bias, groups=4)
    after = F.conv1d(wide, new, shift, groups=7)
    expected = torch.from_numpy(e.expand(before.transpose(1, 2).numpy())).transpose(1, 2)
    assert torch.allclose(after, expected, atol=1e-12)
    if kind == "zero":
        assert new[4:].abs().min() > 0 and (shift[4:] == 0).all()


# ----------------------------------------------------------------- vectors of length one


def test_a_length_is_kept_by_copies_of_equal_energy() -> None:
    row = unit_length("a -> a")
    assert not row.tensors()
    x = np.random.default_rng(0).normal(size=(2, 4))
    for e in (expansion("zero", 4, 7), expansion("circ", 4, 8), expansion("iso", 4, 7)):
        row.require(e, e)
        wide = e.expand(x)
        wide /= np.linalg.norm(wide, axis=1, keepdims=True)
        assert np.allclose(wide[0] @ wide[1], x[0] @ x[1] / np.linalg.norm(x[0]) / np.linalg.norm(x[1]))
    for kind in ("avg", "circ", "rand"):
        with pytest.raises(Refused, match=r"a is divided by its length.*from 4 to 7: try"):
            row.require(expansion(kind, 4, 7), expansion(kind, 4, 7))


# ----------------------------------------------------------------- names on disk


def test_names_that_are_joined_with_an_underscore() -> None:
    assert list(linear("a -> b", joint=True).tensors()) == ["_weight", "_bias"]
    assert list(linear("a -> b").tensors()) == ["weight", "bias"]


@pytest.mark.parametrize(("axes", "shape"), [("", ()), ("1", (1,)), ("1 1", (1, 1))])
def test_a_parameter_without_a_space_stays(axes: str, shape: tuple[int, ...]) -> None:
    row = parameter(axes)
    how = row.recipe("", Typed(identity(1), identity(1), tuple(identity(n) for n in shape)), KEEP)
    assert isinstance(how, Vector) and how.expansion.is_identity and how.rule == "copied"


# ----------------------------------------------------------------- heads in groups, and zeros under nonlinearities


@pytest.mark.parametrize(("kind", "flag"), [("zero", Fill.ZERO), ("rand", Fill.RAND)])
def test_groups_of_heads_with_equally_many_copies(kind: str, flag: int) -> None:
    """Two groups of two heads become two of five: every head twice, and a slot of each group is left."""
    grown = grouped_expansion(4, 10, identity(2), kind)
    assert grown.source.tolist() == [0, 1, 0, 1, flag, 2, 3, 2, 3, flag]
    # A group with one copy and one with two: what the first has room for decides.
    under = expansion("circ", 2, 3)
    assert grouped_expansion(4, 9, under, kind).source.tolist() == [0, 1, flag, 2, 3, flag, flag, flag, flag]


def two_norms(width: int, inner: int, calm: bool) -> Spec:
    """A stream, and units under SiLU that a norm with the same eps reads."""
    return Spec(
        rows={
            "layers.*.norm": rms_norm("residual -> normed"),
            "layers.*.up": linear("normed -> units"),
            "layers.*.gated": rms_norm("units -> gated"),
            "layers.*.down": linear("gated -> residual"),
        },
        spaces={
            "residual": zero(width),
            "normed": zero(width),
            "units": silent(inner, calm=calm),
            "gated": zero(inner),
        },
        stacks={"layers": Stack(1, "residual")},
        eps="eps",
        acts=("units",),
    )


def test_a_norm_behind_a_nonlinearity_keeps_the_eps_and_the_stream_takes_a_gain() -> None:
    source, target = two_norms(4, 6, True), two_norms(6, 8, True)
    types = check(source, target, list(source.rows), {"eps": 1e-3})
    assert types.eps == {"eps": pytest.approx(1e-3 * 6 / 8)}
    assert types.spaces["residual"].gain == pytest.approx((6 / 8) ** 0.5 / (4 / 6) ** 0.5)
    assert types.spaces["units"].is_plain
    # eps* = (gain eta)^2 eps, for both.
    for name, eta in (("residual", (4 / 6) ** 0.5), ("units", (6 / 8) ** 0.5)):
        assert (types.spaces[name].gain * eta) ** 2 * 1e-3 == pytest.approx(types.eps["eps"])


def test_zeros_pass_a_nonlinearity_only_where_it_takes_zero_to_zero() -> None:
    source, target = two_norms(4, 6, False), two_norms(4, 8, False)
    with pytest.raises(Refused, match="cannot widen units"):
        check(source, target, list(source.rows), {"eps": 1e-3})


# ----------------------------------------------------------------- parts of config.json


def test_a_dot_leads_into_a_part_of_the_config() -> None:
    values = {"a": 1, "part": {"b": 2}, "none": None}
    config = Config(values, {"part.c": 3, "none.d": 4})
    assert (config["a"], config["part.b"], config["part.c"], config["none.d"]) == (1, 2, 3, 4)
    assert config.maybe("part.b") == 2 and config.maybe("none.d") is None
    assert config.asked == {"a", "part.b", "part.c", "none.d"}
    new = with_fields(values, {"part.b": 5, "none.d": 6})
    assert new == {"a": 1, "part": {"b": 5}, "none": {"d": 6}}
    assert values["part"] == {"b": 2}


def test_a_class_by_the_end_of_its_name() -> None:
    config = Config({"architectures": ["CLIPForImageClassification"]}, {})
    assert config.is_a("ForImageClassification") and not config.is_a("Model")
    assert not Config({}, {}).is_a("Model")


# ----------------------------------------------------------------- training


def test_images_of_another_size_are_refused_by_both_towers() -> None:
    """A model of text and images is told of other images in one line, before anything runs."""
    from types import SimpleNamespace

    from lemonx.errors import BadData, BadTarget
    from lemonx_lab.data.model import require_fit
    from lemonx_lab.data.tasks import task_of

    made: Any = SimpleNamespace(model={"image_size": 16, "num_channels": 1}, length=None)
    config = {"architectures": ["CLIPForImageClassification"], "vision_config": {"image_size": 16, "num_channels": 3}}
    assert task_of(config) == "image-classification"
    with pytest.raises(BadData, match="the model has num_channels = 3, but the data has 1"):
        require_fit(made, config)
    with pytest.raises(BadTarget, match="lemonx cannot train the head of CLIPModel"):
        task_of({"architectures": ["CLIPModel"]})
