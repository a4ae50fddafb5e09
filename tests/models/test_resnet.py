"""The torchvision-named ResNet: its names, its function, and its way to disk and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageClassification

from lemonx.models import register
from lemonx.models.resnet import (
    TorchvisionResNetConfig,
    TorchvisionResNetForImageClassification,
    config_from_state_dict,
)
from pico import PICO, inputs, outputs, save

NAMES = ["torchvision-bottleneck", "torchvision-basic", "cifar-basic"]


def norm(tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Batch normalisation by the running statistics, written out."""
    scale = tensors[f"{name}.weight"] / (tensors[f"{name}.running_var"] + 1e-5).sqrt()
    shift = tensors[f"{name}.bias"] - tensors[f"{name}.running_mean"] * scale
    return x * scale[:, None, None] + shift[:, None, None]


def cifar_resnet(tensors: Mapping[str, Tensor], x: Tensor, depth: int) -> Tensor:
    """The CIFAR ResNet with option-A shortcuts as its paper describes it, without any module."""
    x = F.relu(norm(tensors, "bn1", F.conv2d(x, tensors["conv1.weight"], padding=1)))
    for stage in (1, 2, 3):
        for block in range(depth):
            name, strided = f"layer{stage}.{block}", stage > 1 and block == 0
            y = F.conv2d(x, tensors[f"{name}.conv1.weight"], stride=2 if strided else 1, padding=1)
            y = F.conv2d(F.relu(norm(tensors, f"{name}.bn1", y)), tensors[f"{name}.conv2.weight"], padding=1)
            if strided:
                planes = y.shape[1]
                x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4))
            x = F.relu(norm(tensors, f"{name}.bn2", y) + x)
    x = F.avg_pool2d(x, x.shape[3]).flatten(1)
    return F.linear(x, tensors["linear.weight"], tensors["linear.bias"])


def test_a_trained_cifar_resnet_loads_and_runs(real: Path) -> None:
    tensors, depth = load_file(real / "resnet20" / "model.safetensors"), 3
    config = config_from_state_dict(tensors)
    assert (config.block, config.stem) == ("basic", "cifar")
    assert (config.shortcut, config.classifier) == ("A", "linear")
    assert (config.layers, config.width, config.num_labels) == ([depth] * 3, 16, 10)
    assert config.inner_width == config.stage_width == [16, 32, 64]
    model = TorchvisionResNetForImageClassification(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    # These files are older than the counters.
    assert not unexpected and all(key.endswith("num_batches_tracked") for key in missing)
    model.double().eval()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = cifar_resnet({key: value.double() for key, value in tensors.items()}, x, depth)
        torch.testing.assert_close(model(x).logits, expected, rtol=0, atol=1e-12)


def test_names_and_shapes_are_torchvisions() -> None:
    config = TorchvisionResNetConfig(num_labels=1000)
    with torch.device("meta"):
        tensors = TorchvisionResNetForImageClassification(config).state_dict()
    # The published counts of torchvision's resnet50.
    assert len(tensors) == 320
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert sum(x.numel() for name, x in tensors.items() if not name.endswith(statistics)) == 25_557_032
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.num_batches_tracked": (),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "layer4.2.bn3.bias": (2048,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    assert {name: tuple(tensors[name].shape) for name in shapes} == shapes
    assert "layer2.1.downsample.0.weight" not in tensors


def test_wide_resnet50_2_has_its_published_size() -> None:
    config = TorchvisionResNetConfig(inner_width=[128, 256, 512, 1024], num_labels=1000)
    with torch.device("meta"):
        model = TorchvisionResNetForImageClassification(config)
    assert sum(x.numel() for x in model.parameters()) == 68_883_240


@pytest.mark.parametrize(("layers", "count"), [([2, 2, 2, 2], 11_689_512), ([3, 4, 6, 3], 21_797_672)])
def test_resnet18_and_34_have_their_published_sizes(layers: list[int], count: int) -> None:
    widths = [64, 128, 256, 512]
    config = TorchvisionResNetConfig(
        block="basic", layers=layers, inner_width=widths, stage_width=widths, num_labels=1000
    )
    with torch.device("meta"):
        model = TorchvisionResNetForImageClassification(config)
    assert sum(x.numel() for x in model.parameters()) == count
    assert "layer1.0.downsample.0.weight" not in model.state_dict()


def test_it_computes_what_the_resnet_of_transformers_computes() -> None:
    theirs = PICO["resnet-bottleneck"]()
    config = TorchvisionResNetConfig(
        layers=[2, 3], width=8, inner_width=[4, 8], stage_width=[16, 32], num_labels=7, block="bottleneck"
    )
    model = TorchvisionResNetForImageClassification(config).double().eval()
    model.load_state_dict({torchvision_name(name): x for name, x in theirs.state_dict().items()})
    batch = inputs(theirs, seed=3)
    torch.testing.assert_close(outputs(model, batch), outputs(theirs, batch), rtol=0, atol=1e-13)


def torchvision_name(name: str) -> str:
    """The name in torchvision of a tensor of transformers' bottleneck ResNet."""
    parts = name.removeprefix("resnet.").split(".")
    if parts[0] == "classifier":
        return f"fc.{parts[-1]}"
    kind, leaf = parts[-2], parts[-1]
    if parts[0] == "embedder":
        return f"{'conv1' if kind == 'convolution' else 'bn1'}.{leaf}"
    block = f"layer{int(parts[2]) + 1}.{parts[4]}"
    if parts[5] == "shortcut":
        return f"{block}.downsample.{0 if kind == 'convolution' else 1}.{leaf}"
    return f"{block}.{'conv' if kind == 'convolution' else 'bn'}{int(parts[6]) + 1}.{leaf}"


@pytest.mark.parametrize("name", NAMES)
def test_the_config_can_be_read_off_the_tensors(name: str) -> None:
    model = PICO[name]()
    fields = ("block", "layers", "width", "inner_width", "stage_width", "num_channels", "stem", "shortcut")
    config = config_from_state_dict(model.state_dict())
    for field in (*fields, "classifier", "num_labels"):
        assert getattr(config, field) == getattr(model.config, field), field


@pytest.mark.parametrize("name", NAMES)
def test_disk_and_back(name: str, tmp_path: Path) -> None:
    register()
    register()
    model = PICO[name]()
    save(model, tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), TorchvisionResNetConfig)
    loaded, report = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded) is type(model) and loaded.dtype == torch.float64
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    batch = inputs(model, seed=2)
    torch.testing.assert_close(outputs(loaded, batch), outputs(model, batch), rtol=0, atol=1e-14)


def test_a_file_without_counters_is_complete(tmp_path: Path) -> None:
    model = PICO["cifar-basic"]()
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if not name.endswith("num_batches_tracked")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.bn1.num_batches_tracked == 0
    assert config_from_state_dict(kept).layers == model.config.layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("conv1.weight"), "conv1.weight is missing"),
        (lambda t: t.pop("layer2.1.bn1.bias"), "missing .*layer2.1.bn1.bias"),
        (lambda t: t.update({"layer1.0.se.weight": torch.ones(1)}), "unknown .*layer1.0.se.weight"),
        (lambda t: t.update({"layer1.1.conv1.weight": torch.ones(3, 8, 3, 3)}), "expected"),
        (lambda t: t.clear(), "missing"),
    ],
)
def test_other_state_dicts_are_refused(change, message: str) -> None:
    tensors = dict(PICO["torchvision-basic"]().state_dict())
    change(tensors)
    with pytest.raises(ValueError, match=message):
        config_from_state_dict(tensors)


@pytest.mark.parametrize(
    "fields",
    [{"block": "wide"}, {"stem": "small"}, {"shortcut": "C"}, {"layers": [1, 2]}, {"stage_width": [1]}],
)
def test_senseless_configs_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match="must"):
        TorchvisionResNetConfig(**fields)


def test_labels_give_a_loss_that_trains() -> None:
    model = PICO["cifar-basic"]().train()
    result = model(**inputs(model, seed=4), labels=torch.tensor([1, 2]))
    result.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
