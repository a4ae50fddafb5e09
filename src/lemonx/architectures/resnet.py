"""ResNet, in transformers' names and in torchvision's."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import batch_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, circ, padded
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, linear

# Activations with act(act(x)) = act(x): a block ends in one, so only with these is a silent block the identity.
IDEMPOTENT = ("relu", "relu6", "linear")
# FLOPs are counted for images of this side: a ResNet's config does not say.
IMAGE = 224


@architecture(
    "resnet",
    width=("embedding_size", "hidden_sizes"),
    depth="depths",
    kind="vision",
    defaults={"num_channels": 3, "layer_type": "bottleneck", "downsample_in_first_stage": False, "hidden_act": "relu"},
)
def resnet(c: Config) -> Spec:
    """ResNet: BatchNorm, basic or bottleneck blocks."""
    widths, last = [c["embedding_size"], *c["hidden_sizes"]], len(c["hidden_sizes"])
    three, strided = c["layer_type"] == "bottleneck", c["downsample_in_first_stage"]
    side, act = IMAGE // 4, c["hidden_act"]
    still = "" if act in IDEMPOTENT else f"a block ends in {act}, which changes what a silent one passes on"
    # Without a shortcut of its own the first stage goes on with the stem's stream.
    entry = "stage0" if strided or widths[0] != widths[1] else "stage1"
    spaces: dict[str, Space] = {"stem": circ(widths[0], (2 * side) ** 2), entry: circ(widths[0], side**2)}
    rows: dict[str, Row] = {
        "resnet.embedder.embedder.convolution": conv("channels -> stem"),
        "resnet.embedder.embedder.normalization": batch_norm(f"stem -> {entry}"),
        "classifier.1": linear(f"stage{last} -> _", optional=True),
    }
    stacks = {}
    for i, width in enumerate(widths[1:], start=1):
        name = f"resnet.encoder.stages.{i - 1}.layers"
        changes = i > 1 or entry == "stage0"
        side //= 2 if i > 1 or strided else 1
        stacks[name] = Stack(c["depths"][i - 1], f"stage{i}", pinned=int(changes), still=still)
        spaces |= _stage(i, width, width // 4 if three else width, side**2)
        for block, n, reads, writes, out in _convolutions(i, three, changes):
            rows[f"{name}.{block}.layer.{n}.convolution"] = conv(f"{reads} -> {writes}")
            rows[f"{name}.{block}.layer.{n}.normalization"] = batch_norm(f"{writes} -> {out}")
        if changes:
            rows[f"{name}.0.shortcut.convolution"] = conv(f"stage{i - 1} -> sum{i}")
            rows[f"{name}.0.shortcut.normalization"] = batch_norm(f"sum{i} -> stage{i}")
    return Spec(rows, spaces, stacks, fixed={"channels": c["num_channels"]}, prefix="resnet.")


@architecture(
    "torchvision_resnet",
    width=("width", "stage_width", "inner_width"),
    depth="layers",
    kind="vision",
    defaults={"num_channels": 3, "stem": "imagenet", "shortcut": "B", "classifier": "fc"},
)
def torchvision_resnet(c: Config) -> Spec:
    """ResNet in torchvision's names: WideResNet and the CIFAR ResNets too."""
    widths, last = [c["width"], *c["stage_width"]], len(c["layers"])
    three, cifar = c["block"] == "bottleneck", c["stem"] == "cifar"
    side = 32 if cifar else IMAGE // 4
    stem = side if cifar else 2 * side
    entry = "stage0" if widths[0] != widths[1] else "stage1"
    spaces: dict[str, Space] = {"stem": circ(widths[0], stem**2), entry: circ(widths[0], side**2)}
    rows: dict[str, Row] = {
        "conv1": conv("channels -> stem"),
        "bn1": batch_norm(f"stem -> {entry}"),
        c["classifier"]: linear(f"stage{last} -> _"),
    }
    stacks = {}
    for i, width in enumerate(widths[1:], start=1):
        name, changes = f"layer{i}", i > 1 or entry == "stage0"
        side //= 2 if i > 1 else 1
        stacks[name] = Stack(c["layers"][i - 1], f"stage{i}", pinned=int(changes))
        spaces |= _stage(i, width, c["inner_width"][i - 1], side**2)
        for block, n, reads, writes, out in _convolutions(i, three, changes):
            rows[f"{name}.{block}.conv{n + 1}"] = conv(f"{reads} -> {writes}")
            rows[f"{name}.{block}.bn{n + 1}"] = batch_norm(f"{writes} -> {out}")
        if changes and c["shortcut"] == "B":
            rows[f"{name}.0.downsample.0"] = conv(f"stage{i - 1} -> sum{i}")
            rows[f"{name}.0.downsample.1"] = batch_norm(f"sum{i} -> stage{i}")
        if changes and c["shortcut"] == "A":
            # A shortcut without parameters puts the channels of the stage before between zeros.
            spaces[f"stage{i}"] = padded(width, f"stage{i - 1}", side**2)
            spaces[f"sum{i}"] = replace(spaces[f"sum{i}"], like=f"stage{i}")
    return Spec(rows, spaces, stacks, {"channels": c["num_channels"]})


def _stage(i: int, width: int, inner: int, at: int) -> dict[str, Space]:
    return {f"{name}{i}": circ(size, at) for name, size in
            (("stage", width), ("sum", width), ("inner", inner), ("middle", inner))}  # fmt: skip


def _convolutions(i: int, three: bool, changes: bool) -> Iterator[tuple[str, int, str, str, str]]:
    """(block, number, reads, writes, norm writes): a block of its own where the first one changes the shape."""
    for block, reads in (("0", f"stage{i - 1}"), ("*", f"stage{i}"))[not changes :]:
        path = [reads, f"inner{i}", *([f"middle{i}"] if three else []), f"sum{i}"]
        for n, (a, b) in enumerate(pairwise(path)):
            yield block, n, a, b, f"stage{i}" if b == f"sum{i}" else b
