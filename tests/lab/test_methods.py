"""The methods that LEMON is compared with: what each writes, and the paper's table 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
from lemonx import methods
from lemonx.algebra.free_parameters import EVEN
from lemonx.checkpoints import Checkpoint
from lemonx.errors import Refused
from lemonx.options.declared import Growth
from lemonx.planning.plan import Plan, make_plan
from lemonx.planning.policy import lemon
from lemonx.planning.request import Target
from lemonx.verification.outputs import compare
from lemonx.verification.rounding import EXACT_TOLERANCE
from lemonx.verification.symmetry import find_twins
from lemonx_lab.experiments import method_table
from pico import PICO, save

LAYERS = "transformer.h"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    for name in ("gpt2-lm", "gpt2-inner", "bert-mlm", "llama-tied", "resnet-basic"):
        save(PICO[name](), folder / name)
    return folder


def grown(source: Path, target: Path, method: Any, **options: Any) -> dict[str, torch.Tensor]:
    lemonx.expand(source, target, method=method, verify=False, force=True, **options)
    return load_file(target / "model.safetensors")


def difference(source: Path, target: Path) -> float:
    with Checkpoint.open(source) as small, Checkpoint.open(target) as large:
        return compare(small, large, rounding=None)[0].difference


def planned(source: Path, method: str, **sizes: object) -> Plan:
    return lemonx.plan(source, method=method, **sizes)


def test_table_1_of_the_paper() -> None:
    """Lossless (yes), lossy (no) or not applicable, as the paper claims; depth, divisible, indivisible width."""
    claims = {
        "stackbert": ("no", "n/a", "n/a"),
        "mslt": ("no", "n/a", "n/a"),
        "fpi": ("no", "yes", "no"),
        "staged": ("yes", "yes", "n/a"),
        "lemon": ("yes", "yes", "yes"),
        "ki-soft": ("no", "no", "no"),
        "ki-hard": ("no", "no", "no"),
        "let": ("no", "no", "no"),
        "ligo": ("no", "no", "no"),
    }
    measured = method_table.overview()
    words = {method_table.LOSSLESS: "yes", method_table.UNDEFINED: "n/a"}
    for name, claim in claims.items():
        cells = tuple(words.get(measured[name][case], "no") for case in method_table.CASES)
        assert cells == claim, name
        assert measured[name]["free parameters"] == ("yes" if name in ("lemon", "ligo") else "no")
        assert measured[name]["data-free"] == ("no" if name in ("ki-soft", "ki-hard", "let", "ligo") else "yes")


@pytest.mark.parametrize("model", ["gpt2-lm", "bert-mlm", "llama-tied"])
def test_fpi_is_lossless_at_a_multiple_and_stays_symmetric(sources: Path, tmp_path: Path, model: str) -> None:
    grown(sources / model, tmp_path / "t", "fpi", width=96)
    assert difference(sources / model, tmp_path / "t") <= EXACT_TOLERANCE
    with Checkpoint.open(tmp_path / "t") as target:
        symmetry = find_twins(planned(sources / model, "fpi", width=96), target)
    assert symmetry.twins == symmetry.copies > 0


def test_fpi_splits_evenly(sources: Path, tmp_path: Path) -> None:
    """W* = [[W/2, W/2], [W/2, W/2]] for a weight between two doubled spaces."""
    small = load_file(sources / "llama-tied" / "model.safetensors")
    large = grown(sources / "llama-tied", tmp_path / "t", "fpi", width=96)
    name = "model.layers.0.mlp.down_proj.weight"
    torch.testing.assert_close(large[name], small[name].repeat(2, 2) / 2, rtol=1e-15, atol=0)


def test_aki_takes_further_rows_from_the_next_block(sources: Path, tmp_path: Path) -> None:
    small = load_file(sources / "llama-tied" / "model.safetensors")
    large = grown(sources / "llama-tied", tmp_path / "t", "aki", width=96)
    name, rows = "model.layers.{}.mlp.up_proj.weight", 100
    halves = {block: small[name.format(block)].repeat(1, 2) / 2 for block in (0, 1)}
    torch.testing.assert_close(large[name.format(0)][:rows], halves[0], rtol=1e-15, atol=0)
    torch.testing.assert_close(large[name.format(0)][rows:], halves[1], rtol=1e-15, atol=0)
    # The last block has no next one and copies its own.
    torch.testing.assert_close(large[name.format(1)][rows:], halves[1], rtol=1e-15, atol=0)
    assert difference(sources / "llama-tied", tmp_path / "t") > 1e-3


def test_staged_width_is_lemon_with_an_even_split(sources: Path) -> None:
    """The same recipe for every tensor: copies, halves, no noise."""
    with Checkpoint.open(sources / "gpt2-lm") as source:
        plain = make_plan(source, Target(width=96), Growth(free=EVEN), read=lemon)
    staged = planned(sources / "gpt2-lm", "staged", width=96)
    assert staged.free == plain.free
    for ours, theirs in zip(plain.steps, staged.steps, strict=True):
        assert (ours.name, ours.shape, ours.recipe.rule) == (theirs.name, theirs.shape, theirs.recipe.rule)


def test_staged_depth_silences_norms_and_biases(sources: Path, tmp_path: Path) -> None:
    large = grown(sources / "gpt2-lm", tmp_path / "t", "staged", depth=4)
    small = load_file(sources / "gpt2-lm" / "model.safetensors")
    for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "attn.c_proj.bias", "mlp.c_proj.bias", "mlp.c_fc.bias"):
        assert not large[f"{LAYERS}.1.{name}"].any()
        assert large[f"{LAYERS}.0.{name}"].equal(small[f"{LAYERS}.0.{name}"])
    assert large[f"{LAYERS}.1.mlp.c_fc.weight"].equal(small[f"{LAYERS}.0.mlp.c_fc.weight"])
    assert difference(sources / "gpt2-lm", tmp_path / "t") <= EXACT_TOLERANCE


@pytest.mark.parametrize("factor", [2, 1.5])
def test_net2net_is_lossless_on_a_resnet(sources: Path, tmp_path: Path, factor: float) -> None:
    grown(sources / "resnet-basic", tmp_path / "t", "net2net", width=f"{factor}x", set={"depths": [3, 4]})
    assert difference(sources / "resnet-basic", tmp_path / "t") <= EXACT_TOLERANCE


@pytest.mark.parametrize(
    ("method", "depth", "order"),
    [
        ("stackbert", 4, [0, 1, 0, 1]),
        ("gstack", 6, [0, 1, 0, 1, 0, 1]),
        ("mslt", 3, [0, 1, 1]),
        ("mslt", 4, [0, 1, 0, 1]),
        ("fpi", 3, [0, 1, 0]),
        ("solar", 4, [0, 1, 0, 1]),
        ("llama-pro", 3, [0, 1, 1]),
        ("llama-pro", 4, [0, 0, 1, 1]),
        ("staged", 4, [0, 0, 1, 1]),
    ],
)
def test_where_added_blocks_stand(sources: Path, method: str, depth: int, order: list[int]) -> None:
    plan = planned(sources / "gpt2-lm", method, depth=depth)
    assert [block.source for block in plan.blocks[LAYERS]] == order


def test_solar_overlaps() -> None:
    """32 blocks to 48, as in its paper: 0..23 and then 8..31."""
    from lemonx.specs.spec import Stack
    from lemonx_lab.rivals.stacking import _overlapping

    order = [block.source for block in _overlapping("layers", Stack(32, "residual"), 48)]
    assert order == [*range(24), *range(8, 32)]


@pytest.mark.parametrize(
    ("method", "sizes", "says"),
    [
        ("stackbert", {"width": 96}, "stackbert only grows depth"),
        ("hypercloning", {"depth": 4}, "hypercloning only grows width"),
        ("hypercloning", {"width": 72}, "only multiplies sizes by whole numbers"),
        ("staged", {"width": 144}, "try --width 96"),
        ("staged", {"depth": 3}, "try 4"),
        ("stackbert", {"depth": 6}, "try 4"),
        ("gstack", {"depth": 5}, "try 4 or 6"),
        ("solar", {"depth": 3}, "even number of layers up to 4"),
        ("mslt", {"depth": 5}, "try at most 4 layers"),
        ("lama-pro", {"depth": 4}, "did you mean 'llama-pro'"),
    ],
)
def test_where_a_method_is_not_defined_it_says_so(sources: Path, method: str, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(lemonx.LemonxError, match=says):
        planned(sources / "gpt2-inner", method, **sizes)


def test_staged_is_not_defined_for_post_ln_depth(sources: Path) -> None:
    with pytest.raises(Refused, match="Post-LN"):
        planned(sources / "bert-mlm", "staged", depth=4)


def test_a_lossy_method_says_what_it_is(sources: Path, tmp_path: Path) -> None:
    import json

    lemonx.expand(sources / "gpt2-lm", tmp_path / "t", method="gstack", depth=4)
    content = json.loads((tmp_path / "t" / "lemonx.json").read_text())
    assert content["method"] == "gstack" and content["lossless"] is False
    outputs = content["verified"]["outputs"]
    assert not outputs["passed"] and outputs["difference"] > 1e-3 and outputs["kl"] > 0
    card = (tmp_path / "t" / "README.md").read_text()
    assert "not lossless" in card and "Verified" not in card
    assert not lemonx.verify(sources / "gpt2-lm", tmp_path / "t").passed


def test_every_method_states_its_paper() -> None:
    for name, method in methods.methods().items():
        assert method.title and method.paper and set(method.grows) <= {"width", "depth"}, name


FAMILIES = {
    "gpt2-lm": {"width": 72, "depth": 5},
    "llama-tied": {"width": 96, "depth": 4},
    "bert-mlm": {"width": 96, "depth": 3},
    "resnet-basic": {"width": "2x", "set": {"depths": [3, 4]}},
}


@pytest.mark.parametrize("model", FAMILIES)
def test_scratch_is_what_transformers_draws(sources: Path, tmp_path: Path, model: str) -> None:
    large = grown(sources / model, tmp_path / "t", "scratch", seed=3, **FAMILIES[model])
    built = type(PICO[model]())
    config = built.config_class.from_pretrained(tmp_path / "t")
    torch.manual_seed(3)
    built._from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert large.keys() == again.keys()
    for name, tensor in again.items():
        assert large[name].equal(tensor.to(large[name].dtype)), name


def test_inheritance_starts_as_scratch_and_says_how_to_train(sources: Path, tmp_path: Path) -> None:
    import json

    fresh = grown(sources / "gpt2-lm", tmp_path / "s", "scratch", width=72)
    for name, kind in {"ki-soft": "soft", "ki-hard": "hard", "let": "early"}.items():
        start = grown(sources / "gpt2-lm", tmp_path / kind, name, width=72)
        assert all(start[name].equal(fresh[name]) for name in fresh)
        content = json.loads((tmp_path / kind / "lemonx.json").read_text())
        assert f"inheritance {kind}" in content["notes"][0] and content["lossless"] is False
        assert content["tensors"][f"{LAYERS}.0.mlp.c_fc.weight"]["from"] == "fresh"
        assert methods.find(name).inherits == kind


class _Taught:
    """The operators of LiGO before they learn, and without noise if `noise` is 0."""

    def __init__(self, source: Path, noise: float, monkeypatch: pytest.MonkeyPatch, **sizes: object) -> None:
        from lemonx_lab.rivals import ligo

        monkeypatch.setattr(ligo, "NOISE", noise)
        self.plan = planned(source, "ligo", **sizes)
        with Checkpoint.open(source) as checkpoint:
            self.operators = ligo._Operators(self.plan, checkpoint)

    def tensors(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return dict(self.operators.tensors())


@pytest.mark.parametrize("model", ["gpt2-lm", "llama-tied", "bert-mlm"])
def test_ligo_starts_at_fpi(sources: Path, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that copy and stack, without noise, are bert2BERT's FPI."""
    fpi = grown(sources / model, tmp_path / "t", "fpi", width=96, depth=4)
    start = _Taught(sources / model, 0.0, monkeypatch, width=96, depth=4).tensors()
    assert start.keys() == fpi.keys()
    for name, tensor in fpi.items():
        torch.testing.assert_close(start[name].double(), tensor, rtol=1e-6, atol=1e-7, msg=name)


def test_ligo_is_its_formula(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W*_l = sum_j w[l, j] B_out W_j (S B_in)^T, written out for one weight with a fused axis."""
    taught = _Taught(sources / "llama-tied", 0.3, monkeypatch, width=72, depth=3)
    operators, name = taught.operators, "model.layers.{}.self_attn.o_proj.weight"
    small = load_file(sources / "llama-tied" / "model.safetensors")
    row = next(step.row for step in taught.plan.steps if step.name == name.format(0))
    reads = taught.plan.source_spec.rows[row].reads.axes  # heads, and each head's own width
    heads = operators.width[reads[0]] * operators.share[reads[0]][:, None]
    b_in = torch.kron(heads, torch.eye(12))
    b_out = operators.width["residual"]
    wide = [b_out @ small[name.format(j)].float() @ b_in.T for j in (0, 1)]
    mix = operators.depth[row]
    for block, tensor in enumerate(taught.tensors()[name.format(block)] for block in range(3)):
        expected = mix[block, 0] * wide[0] + mix[block, 1] * wide[1]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)


def test_ligo_learns(tmp_path: Path) -> None:
    """On the embedded data the loss falls below where the operators began, and every copy is its own."""
    method_table._small_model(0).float().save_pretrained(tmp_path / "s")
    losses: list[float] = []
    learn: Any = {"name": "ligo", "steps": 40}
    grown(tmp_path / "s", tmp_path / "t", learn, width=72, depth=3, learned=lambda step, loss: losses.append(loss))
    assert len(losses) == 40
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.5


def test_data_for_a_method_that_takes_none(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(lemonx.LemonxError, match="does not learn, so it takes no data"):
        learn = {"name": "lemon", "data": {"kind": "stdlib"}}
        lemonx.expand(sources / "gpt2-lm", tmp_path / "t", width=72, method=learn)


def test_midas_repeats_the_middle(sources: Path, tmp_path: Path) -> None:
    source = tmp_path / "s"
    grown(sources / "llama-tied", source, "stackbert", depth=4)
    blocks = planned(source, "midas", depth=6).blocks["model.layers"]
    assert [block.source for block in blocks] == [0, 1, 2, 1, 2, 3] and not any(block.added for block in blocks)


def test_lesa_predicts_a_block_from_its_neighbours(sources: Path, tmp_path: Path) -> None:
    """Weights that change linearly with depth are continued linearly; blocks of the source stay."""
    source = load_file(sources / "llama-tied" / "model.safetensors")
    lemonx.expand(sources / "llama-tied", tmp_path / "s", method="stackbert", depth=4, verify=False)
    file = tmp_path / "s" / "model.safetensors"
    tensors = load_file(file)
    for i in range(4):
        for name, first in source.items():
            if name.startswith("model.layers.0."):
                step = source[name.replace("layers.0", "layers.1")] - first
                tensors[name.replace("layers.0", f"layers.{i}")] = first + i * step
    save_file(tensors, file, metadata={"format": "pt"})
    made = grown(tmp_path / "s", tmp_path / "t", "lesa", depth=6)
    name = "model.layers.{}.mlp.up_proj.weight"
    order = [0, 0.5, 1, 2, 2.5, 3]
    first, step = tensors[name.format(0)], tensors[name.format(1)] - tensors[name.format(0)]
    for i, place in enumerate(order):
        assert torch.allclose(made[name.format(i)], first + place * step, atol=1e-8), i
    assert torch.equal(made["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    with pytest.raises(Refused, match="try at most 7 layers"):
        planned(tmp_path / "s", "lesa", depth=8)


def test_warmstart_adds_a_shrunken_source_to_a_new_model(sources: Path, tmp_path: Path) -> None:
    """Fused axes included: each part of c_attn begins with the source's."""
    made = grown(sources / "gpt2-lm", tmp_path / "w", "warmstart", width=96)
    new = grown(sources / "gpt2-lm", tmp_path / "n", "scratch", width=96)
    source = load_file(sources / "gpt2-lm" / "model.safetensors")
    name = f"{LAYERS}.0.attn.c_attn.weight"
    added = (made[name] - new[name]).view(96, 3, 96)
    assert torch.allclose(added[:48, :, :48], 0.4 * source[name].view(48, 3, 48), atol=1e-7)
    assert not added[48:].any() and not added[:, :, 48:].any()
    assert torch.allclose(made[f"{LAYERS}.1.ln_1.weight"][:48], source[f"{LAYERS}.1.ln_1.weight"], atol=1e-7)


def test_drop_upcycling_redraws_half_of_the_units_of_every_expert(sources: Path, tmp_path: Path) -> None:
    """The same units in all three matrices of an expert, others in another expert; all else is the source's."""
    fields = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
    made = grown(sources / "llama-tied", tmp_path / "t", "drop-upcycling", set=fields)
    source = load_file(sources / "llama-tied" / "model.safetensors")
    kept = []
    for expert in range(3):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.{{}}.weight"
        same = [
            (made[name.format(new)] == source[f"model.layers.1.mlp.{old}_proj.weight"]).all(axis)
            for new, old, axis in (("w1", "gate", 1), ("w3", "up", 1), ("w2", "down", 0))
        ]
        assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
        assert int(same[0].sum()) == len(same[0]) - len(same[0]) // 2
        kept.append(same[0])
        redrawn, old = made[name.format("w1")][~same[0]], source["model.layers.1.mlp.gate_proj.weight"][~same[0]]
        # Of n numbers, the standard deviation is off by 1 / sqrt(2 n) of itself: here 1.5 %, and 6 times that at most.
        assert float(redrawn.std()) == pytest.approx(float(old.std()), rel=6 / (2 * old.numel()) ** 0.5)
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])
    assert torch.equal(made["model.embed_tokens.weight"], source["model.embed_tokens.weight"])
    with pytest.raises(Refused, match="only turns the MLPs of a dense model into experts"):
        planned(sources / "llama-tied", "drop-upcycling", width=96)


def test_a_package_that_cannot_be_loaded_is_named_and_stops_nothing(tmp_path: Path) -> None:
    """Commands and methods come by entry points, and those of others may be broken."""
    found = tmp_path / "evil-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    groups = "".join(f"[lemonx.{group}]\nevil = no_such_module\n" for group in ("commands", "methods"))
    (found / "entry_points.txt").write_text(groups)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lemonx", *words]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})

    helped = run("--help")
    assert helped.returncode == 0 and "expand" in helped.stdout and "commands of no_such_module" in helped.stderr
    assert "net2net" in run("methods").stdout
    config = Path(__file__).parents[1] / "data" / "stories260K"
    refused = run("plan", str(config), "--width", "96", "--method", "no-such-method")
    assert refused.returncode == 2 and "no_such_module cannot be loaded" in refused.stderr
