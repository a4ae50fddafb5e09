"""`lemonx.grow`: a larger instance of any module computes the same, or it is refused and stays as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lemonx
from lemonx_lab.survey.randomise import randomise
from tracing.mixing import FEATURES, FUNCTIONS, TOKENS, Mixed
from zoo import ZOO, run

# What must grow, by model and growth; all others of the zoo may be refused.
WIDER = list(ZOO)
UNEVEN = ["nanogpt", "llama", "einsum", "lstm", "gru", "shared", "pre-norm encoder", "pre-norm decoder",
          "post-norm encoder", "attention pool", "resnet", "timm resnet", "mlp", "vae", "autoencoder",
          "unused"]  # fmt: skip
DEEPER = ["nanogpt", "llama", "einsum", "unused", "pre-norm encoder", "post-norm encoder", "pre-norm decoder",
          "post-norm decoder", "vit", "resnet", "timm resnet", "convnext", "dit", "gnn", "unet"]  # fmt: skip
CASES = [
    *((name, "width x2") for name in WIDER),
    *((name, "width x1.5") for name in UNEVEN),
    *((name, growth) for name in DEEPER for growth in ("depth", "all")),
    ("llama", "heads"),
    ("einsum", "heads"),
]


def assert_same(small: nn.Module, large: nn.Module, inputs: object, bound: float = 1e-10) -> None:
    for a, b in zip(run(small, inputs), run(large, inputs), strict=True):  # type: ignore[arg-type]
        assert float((a - b).abs().max()) <= bound * float(a.abs().max())


@pytest.mark.parametrize(("name", "growth"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_models_that_people_copy_grow(name: str, growth: str) -> None:
    entry = ZOO[name]
    small, large = entry.model(), entry.model(seed=5, **entry.growths[growth])
    before = copy.deepcopy(small.state_dict())
    grown = lemonx.grow(small, large, entry.inputs(0))
    lost = grown.plan.expected_loss if grown.plan.chains else 0.0
    assert_same(small, large, entry.inputs(7), max(1e-10, lost))  # inputs that it has not seen
    assert grown.symmetry.twins == 0
    assert grown.parameters[1] > grown.parameters[0]
    assert all(torch.equal(before[key], value) for key, value in small.state_dict().items())


def test_every_other_growth_of_the_zoo_is_refused_and_changes_nothing() -> None:
    rest = [(name, growth) for name, entry in ZOO.items() for growth in entry.growths if (name, growth) not in CASES]
    for name, growth in rest:
        entry = ZOO[name]
        small, large = entry.model(), entry.model(seed=5, **entry.growths[growth])
        before = copy.deepcopy(large.state_dict())
        with pytest.raises(lemonx.Refused):
            lemonx.grow(small, large, entry.inputs(0))
        assert all(torch.equal(before[key], value) for key, value in large.state_dict().items())


def _fuzzed(seed: int) -> str:
    """What becomes of a module made at random: refused, or grown and the same on other inputs."""
    rng = random.Random(seed)
    depth, heads = rng.randint(1, 5), rng.choice((2, 4))
    small = Mixed(seed, 8 * heads // 2, heads, 10, depth).double().eval()
    times = rng.choice((1, 2, 1.5, 3))
    sizes = int(8 * heads // 2 * times), int(heads * times), rng.choice((10, 13, 20))
    large = Mixed(seed, *sizes, depth).double().eval()
    randomise(small, seed)
    inputs = [torch.randn(3, TOKENS, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
              for i in (seed, seed + 1)]  # fmt: skip
    try:
        lemonx.grow(small, large, inputs[0])
    except lemonx.Refused:
        return "refused"
    with torch.no_grad():
        a, b = small(inputs[1]), large(inputs[1])
    assert float((a - b).abs().max()) <= 1e-9 * float(a.abs().max()), small.kinds
    return "grown"


def test_modules_made_at_random_grow_or_are_refused_beforehand() -> None:
    """The rehearsal would raise NotVerified where an inferred table is wrong: none is."""
    found = [_fuzzed(seed) for seed in range(120)]
    assert min(found.count("grown"), found.count("refused")) > 20


@pytest.mark.parametrize("name", ["running features", "flip", "roll", "softmax", "sum", "spread",
                                  "gram", "sorted", "constant"])  # fmt: skip
def test_an_operation_that_tells_units_apart_is_named(name: str) -> None:
    def model(width: int) -> nn.Module:
        return Mixed(0, width, 2, 10, 0).double()

    small, large = model(8), model(16)
    for module in (small, large):
        module.steps.append(_Function(name))
        module.adds.append(False)
    with pytest.raises(lemonx.Refused, match=r"(steps\.0|the model), \w+: "):
        lemonx.grow(small, large, torch.randn(2, TOKENS, FEATURES, dtype=torch.float64))


class _Function(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return FUNCTIONS[self.name](x)


class _Depends(nn.Module):
    """Goes one way or the other by a number that it computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.relu() if h.sum() > 0 else h.tanh())


def test_code_that_looks_at_what_it_computes_is_refused() -> None:
    with pytest.raises(lemonx.Refused, match="looks at a number that the model computes"):
        lemonx.grow(_Depends(6), _Depends(12), torch.randn(3, 4))


class _TiedAutoencoder(nn.Module):
    """One weight in both directions: each axis is read and written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight.T) @ self.weight


def test_a_weight_that_is_used_in_two_directions_cannot_grow() -> None:
    with pytest.raises(lemonx.Refused, match="two directions"):
        lemonx.grow(_TiedAutoencoder(8), _TiedAutoencoder(16), torch.randn(3, 6))


class _Clamped(nn.Module):
    """A residual block that clamps its stream: with a silent branch it is not the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mlp(x)).clamp(-100.0, 100.0)


def _clamped(depth: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(*(_Clamped(8) for _ in range(depth))), nn.Linear(8, 2))


def test_a_block_that_is_the_identity_on_the_examples_only_cannot_be_added() -> None:
    with pytest.raises(lemonx.Refused, match="is not what it was given, plus what its own parameters write"):
        lemonx.grow(_clamped(2), _clamped(3), torch.randn(3, 4))


def test_stored_in_fewer_bits_it_is_right_up_to_rounding_and_modes_are_kept() -> None:
    def model(width: int, dtype: torch.dtype) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Dropout(0.5), nn.LayerNorm(width), nn.Linear(width, 3)).to(dtype)

    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        small, large = model(16, dtype), model(24, dtype)
        large[1].eval()
        grown = lemonx.grow(small, large, torch.randn(5, 8, dtype=dtype))
        assert 0 <= grown.difference <= grown.tolerance <= bound
        assert small.training and large[0].training and not large[1].training
        assert {tensor.dtype for tensor in large.parameters()} == {dtype}


def test_the_result_says_where_every_parameter_comes_from_and_what_was_not_used() -> None:
    entry = ZOO["unused"]
    small, large = entry.model(), entry.model(seed=5, **entry.growths["depth"])
    grown = lemonx.grow(small, large, [entry.inputs(0), entry.inputs(1)])
    assert grown.rules.keys() == {name for name, _ in large.named_parameters()} | {
        name for name, tensor in large.named_buffers() if tensor.is_floating_point() and name in large.state_dict()
    }
    assert grown.unused and grown.exercised < 1
    assert grown.algebra.passed and grown.method == "lemon"
    assert any("blocks" in name and after == before + 2 for name, (before, after) in grown.sizes.items())


def test_two_classes_and_smaller_sizes_are_refused() -> None:
    with pytest.raises(lemonx.BadTarget, match="two instances of one class"):
        lemonx.grow(nn.Linear(2, 2), nn.Identity(), torch.randn(1, 2))

    def wide(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(2, n), nn.ReLU(), nn.Linear(n, 2))

    with pytest.raises(lemonx.BadTarget, match="would shrink from 4 to 3"):
        lemonx.grow(wide(4), wide(3), torch.randn(1, 2))


class Scored(nn.Module):
    """Attention as it is written out by hand: scores are divided by the root of the head's size, after the product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.norm = nn.Linear(10, width), nn.LayerNorm(width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        rows, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(rows, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1)
        return self.head(x + self.out((scores @ v).transpose(1, 2).reshape(rows, tokens, width)))


@pytest.mark.parametrize("heads", [2, 4])
def test_scores_that_are_scaled_after_the_product_grow_in_heads_and_in_their_size(heads: int) -> None:
    small, large = Scored(16, 2).double(), Scored(32, heads).double()
    lemonx.grow(small, large, torch.randn(3, 7, 10, dtype=torch.float64))
    assert_same(small, large, (torch.randn(2, 5, 10, dtype=torch.float64),))


class Shrinking(nn.Module):
    """Outputs are divided by the root of the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(10, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(x))) / self.head.weight.shape[1] ** 0.5


@pytest.mark.parametrize("name", ["largest", "other rms"])
def test_what_whole_copies_leave_grows_by_whole_copies(name: str) -> None:
    small, large = (Mixed(0, width, 2, 10, 0).double() for width in (8, 16))
    for module in (small, large):
        module.steps.append(_Function(name))
        module.adds.append(False)
    lemonx.grow(small, large, torch.randn(2, TOKENS, FEATURES, dtype=torch.float64))
    assert_same(small, large, (torch.randn(3, TOKENS, FEATURES, dtype=torch.float64),))


def test_a_number_of_the_width_behind_a_head_is_taken_up_by_the_head() -> None:
    small, large = Shrinking(12).double(), Shrinking(24).double()
    lemonx.grow(small, large, torch.randn(3, 10, dtype=torch.float64))
    assert_same(small, large, (torch.randn(2, 10, dtype=torch.float64),))


def test_a_number_of_the_width_that_no_weight_can_make_up_for_is_refused_beforehand() -> None:
    class Between(Shrinking):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(torch.tanh(self.up(x)) / self.head.weight.shape[1] ** 0.5))

    with pytest.raises(lemonx.Refused, match=r"div.*0\.288675 in the smaller model and 0\.204124 in the larger"):
        lemonx.grow(Between(12), Between(24), torch.randn(3, 10))


class Branch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Nested(nn.Module):
    """Blocks that are lists of modules, the first of which is given what the block is given: T5's."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(10, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(nn.Sequential(Branch(16), Branch(16)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_blocks_that_are_lists_of_branches_are_added() -> None:
    small, large = Nested(2).double(), Nested(5).double()
    lemonx.grow(small, large, torch.randn(3, 10, dtype=torch.float64))
    assert_same(small, large, (torch.randn(2, 10, dtype=torch.float64),))


@pytest.mark.parametrize(
    "number",
    [
        lambda width, tokens: width + tokens.shape[1],
        lambda width, tokens: 1 + width * tokens.shape[0],
        lambda width, tokens: max(width, tokens.shape[1]),
        lambda width, tokens: 1 + tokens.shape[1] % width,
        lambda width, tokens: width ** (tokens.shape[1] / 7),
        lambda width, tokens: width + tokens.double().mean(),
        lambda width, tokens: torch.where(tokens > 45, width, 1)[..., None],
    ],
)
def test_a_number_of_the_width_and_of_the_input_is_no_number_of_the_width(number: Callable[[int, Tensor], Any]) -> None:
    """The example shows one number in each size, for which the head could make up."""

    class Model(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 9)

        def forward(self, tokens: Tensor) -> Tensor:
            x = torch.relu(self.embed(tokens))
            return self.head(x) * number(x.shape[2], tokens)

    small, large = Model(16).double(), Model(32).double()
    before = copy.deepcopy(large.state_dict())
    with pytest.raises(lemonx.LemonxError, match=r"differ|number"):
        lemonx.grow(small, large, torch.randint(40, (3, 7)))
    assert all(torch.equal(before[key], value) for key, value in large.state_dict().items())
