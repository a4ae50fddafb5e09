"""ResNets whose state dict has torchvision's names: torchvision, timm's plain ResNets, and the CIFAR ResNets.

The names are conv1, bn1, layer1.0.conv1, layer1.0.bn1, ..., layer1.0.downsample.0, layer1.0.downsample.1, fc.
transformers' own ResNet cannot hold all of them: a block's inner width is its output's, or a quarter of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

_STEMS = ("imagenet", "cifar")
_SHORTCUTS = ("A", "B")
# Files from before torch 0.4.1 do not have these; only training reads them.
_COUNTER = ".num_batches_tracked"


class TorchvisionResNetConfig(PreTrainedConfig):
    """The sizes of a ResNet; the defaults are ResNet-50's.

    `inner_width` counts the channels inside a stage's blocks (a basic block's: between its two convolutions),
    `stage_width` those its blocks write. `stem` is "imagenet" (7x7, stride 2, max-pooling) or "cifar" (3x3).
    `shortcut` says what a shape-changing block adds its output to: "B", its input through a strided 1x1
    convolution and a norm; "A", every second pixel of it between channels of zeros. `classifier` names the
    last layer.
    """

    model_type = "torchvision_resnet"

    block: str = "bottleneck"
    layers: list[int] | tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    inner_width: list[int] | tuple[int, ...] = (64, 128, 256, 512)
    stage_width: list[int] | tuple[int, ...] = (256, 512, 1024, 2048)
    num_channels: int = 3
    stem: str = "imagenet"
    shortcut: str = "B"
    classifier: str = "fc"

    def __post_init__(self, **kwargs: Any) -> None:
        # Lists, so that a config read back from JSON equals the one that was written.
        self.layers = list(self.layers)
        self.inner_width = list(self.inner_width)
        self.stage_width = list(self.stage_width)
        _require("block", self.block, tuple(_BLOCKS))
        _require("stem", self.stem, _STEMS)
        _require("shortcut", self.shortcut, _SHORTCUTS)
        if not len(self.layers) == len(self.inner_width) == len(self.stage_width):
            raise ValueError(
                f"layers {self.layers}, inner_width {self.inner_width} and stage_width {self.stage_width} "
                "must have one entry per stage"
            )
        super().__post_init__(**kwargs)


def _require(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{field} is {value!r}, must be one of {', '.join(map(repr, allowed))}")


class PadShortcut(nn.Module):
    """Every `stride`-th pixel between channels of zeros: option A of the CIFAR ResNets, no parameters."""

    def __init__(self, reads: int, writes: int, stride: int) -> None:
        super().__init__()
        if writes < reads:
            raise ValueError(f"a parameter-free shortcut cannot narrow {reads} channels to {writes}")
        self.reads, self.writes, self.stride = reads, writes, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        zeros = self.writes - self.reads
        return F.pad(x, (0, 0, 0, 0, zeros // 2, zeros - zeros // 2))


def _downsample(shortcut: str, reads: int, writes: int, stride: int) -> nn.Module | None:
    """What the input passes through before it is added, or None where the shapes agree."""
    if reads == writes and stride == 1:
        return None
    if shortcut == "A":
        return PadShortcut(reads, writes, stride)
    return nn.Sequential(nn.Conv2d(reads, writes, 1, stride, bias=False), nn.BatchNorm2d(writes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the first convolution has the stride."""

    def __init__(self, reads: int, inner: int, writes: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(reads, inner, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, writes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(writes)
        self.downsample = _downsample(shortcut, reads, writes, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut; the 3x3 has the stride."""

    def __init__(self, reads: int, inner: int, writes: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(reads, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, writes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(writes)
        self.downsample = _downsample(shortcut, reads, writes, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


_BLOCKS: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class TorchvisionResNetForImageClassification(PreTrainedModel):
    """A ResNet with torchvision's parameter names and a linear classifier on the mean over pixels."""

    config_class = TorchvisionResNetConfig
    main_input_name = "pixel_values"
    # A list because transformers declares one.
    _keys_to_ignore_on_load_missing = [rf"{re.escape(_COUNTER)}$"]  # noqa: RUF012

    def __init__(self, config: TorchvisionResNetConfig) -> None:
        super().__init__(config)
        if config.stem == "imagenet":
            self.conv1 = nn.Conv2d(config.num_channels, config.width, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(config.num_channels, config.width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.stages = [f"layer{stage + 1}" for stage in range(len(config.layers))]
        reads = config.width
        for stage, name in enumerate(self.stages):
            self.add_module(name, _stage(config, stage, reads))
            reads = config.stage_width[stage]
        labels: Any = config.num_labels
        self.add_module(config.classifier, nn.Linear(reads, labels))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # transformers' functions skip what a checkpoint has already filled; torch's own would overwrite it.
        if isinstance(module, nn.Conv2d):
            initialization.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        else:
            super()._init_weights(module)

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutputWithNoAttention:
        """Returns the logits, and the cross-entropy where labels are given."""
        x = F.relu(self.bn1(self.conv1(pixel_values)))
        if self.config.stem == "imagenet":
            x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        logits = self.get_submodule(self.config.classifier)(x.mean(dim=(2, 3)))
        loss: Any = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


def _stage(config: TorchvisionResNetConfig, stage: int, reads: int) -> nn.Sequential:
    """The blocks of one stage: only the first changes the shape, with stride 2 from the second stage on."""
    block, inner, writes = _BLOCKS[config.block], config.inner_width[stage], config.stage_width[stage]
    first = block(reads, inner, writes, 1 if stage == 0 else 2, config.shortcut)
    rest = [block(writes, inner, writes, 1, config.shortcut) for _ in range(config.layers[stage] - 1)]
    return nn.Sequential(first, *rest)


def config_from_state_dict(state_dict: Mapping[str, Tensor]) -> TorchvisionResNetConfig:
    """Returns the config whose model has exactly these names and shapes; raises ValueError where none has."""
    config = _guess(state_dict)
    with torch.device("meta"):
        expected = TorchvisionResNetForImageClassification(config).state_dict()
    missing = sorted(name for name in expected.keys() - state_dict.keys() if not name.endswith(_COUNTER))
    unknown = sorted(state_dict.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(f"not a torchvision ResNet: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, tensor in state_dict.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}")
    return config


def _guess(state_dict: Mapping[str, Tensor]) -> TorchvisionResNetConfig:
    """Reads every field off the tensors that tell it, trusting that the others agree."""
    found = [re.match(r"layer(\d+)\.(\d+)\.", name) for name in state_dict]
    blocks = Counter(stage for stage, _ in {(int(match[1]), int(match[2])) for match in found if match})
    layers = [blocks[stage] for stage in sorted(blocks)]
    bottleneck = "layer1.0.conv3.weight" in state_dict
    last = "conv3" if bottleneck else "conv2"
    classifier = "linear" if "linear.weight" in state_dict else "fc"
    stages = range(1, len(layers) + 1)
    try:
        stem = state_dict["conv1.weight"]
        config = TorchvisionResNetConfig(
            block="bottleneck" if bottleneck else "basic",
            layers=layers,
            width=stem.shape[0],
            inner_width=[state_dict[f"layer{stage}.0.conv1.weight"].shape[0] for stage in stages],
            stage_width=[state_dict[f"layer{stage}.0.{last}.weight"].shape[0] for stage in stages],
            num_channels=stem.shape[1],
            stem="imagenet" if stem.shape[-1] == 7 else "cifar",
            # Without any projection, a network of more than one stage can only have parameter-free shortcuts.
            shortcut="B" if any(".downsample." in name for name in state_dict) or len(layers) == 1 else "A",
            classifier=classifier,
        )
        config.num_labels = state_dict[f"{classifier}.weight"].shape[0]
    except KeyError as error:
        raise ValueError(f"not a torchvision ResNet: {error.args[0]} is missing") from error
    return config
