"""Networks for pictures, in the ways of timm and torchvision, a Mixer and a U-Net."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, CLASSES = 32, 7


def pictures(seed: int, rows: int = 3, length: int = 11) -> tuple[Tensor]:
    """Pictures of one size: `length` is for texts."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 3, SIDE, SIDE, generator=generator, dtype=torch.float64),)


# ----------------------------------------------------------------- timm's ViT


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ViTBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.norm1, self.attn, self.ls1 = norm(dim), Attention(dim, num_heads), LayerScale(dim)
        self.norm2, self.ls2 = norm(dim), LayerScale(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, embed_dim: int, depth: int, num_heads: int, patch: int = 8) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, embed_dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (SIDE // patch) ** 2 + 1, embed_dim))
        self.blocks = nn.Sequential(*[ViTBlock(embed_dim, num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return VisionTransformer(width, depth, heads)


# ----------------------------------------------------------------- torchvision's and timm's ResNets


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Basic blocks in two stages."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(*[BasicBlock(width, width, 1) for _ in range(depth)])
        rest = [BasicBlock(2 * width, 2 * width, 1) for _ in range(depth - 1)]
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), *rest)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet(width: int = 8, depth: int = 2, heads: int = 1) -> nn.Module:
    return ResNet(width, depth)


class Bottleneck(nn.Module):
    """timm's way: a deep stem, pooling on the shortcut, squeeze and excitation."""

    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        wide = 2 * planes
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.se_reduce, self.se_expand = nn.Conv2d(wide, planes, 1), nn.Conv2d(planes, wide, 1)
        self.downsample = nn.Identity()
        if stride != 1 or inplanes != wide:
            pool = nn.AvgPool2d(2, stride) if stride != 1 else nn.Identity()
            self.downsample = nn.Sequential(pool, nn.Conv2d(inplanes, wide, 1, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(h)))))
        gate = self.se_expand(F.relu(self.se_reduce(h.mean((2, 3), keepdim=True))))
        return F.relu(h * gate.sigmoid() + self.downsample(x))


class SEResNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip
        first = [Bottleneck(width, width, 1)] + [Bottleneck(2 * width, width, 1) for _ in range(depth - 1)]
        second = [Bottleneck(2 * width, 2 * width, 2)] + [Bottleneck(4 * width, 2 * width, 1) for _ in range(depth - 1)]
        self.layer1, self.layer2 = nn.Sequential(*first), nn.Sequential(*second)
        self.fc = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


def timm_resnet(width: int = 8, depth: int = 2, heads: int = 1) -> nn.Module:
    return SEResNet(width, depth)


# ----------------------------------------------------------------- torchvision's ConvNeXt


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class CNBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(dim, dim, 7, padding=3, groups=dim), Permute(0, 2, 3, 1), nn.LayerNorm(dim, eps=1e-6),
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), Permute(0, 3, 1, 2),
        )  # fmt: skip
        self.layer_scale = nn.Parameter(torch.ones(dim, 1, 1) * 1e-1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale * self.block(x)


class ConvNeXt(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, dim, 4, 4), LayerNorm2d(dim, eps=1e-6)),
            nn.Sequential(*[CNBlock(dim) for _ in range(depth)]),
            nn.Sequential(LayerNorm2d(dim, eps=1e-6), nn.Conv2d(dim, 2 * dim, 2, 2)),
            nn.Sequential(*[CNBlock(2 * dim) for _ in range(depth)]),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(LayerNorm2d(2 * dim, eps=1e-6), nn.Flatten(1), nn.Linear(2 * dim, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)))


def convnext(width: int = 12, depth: int = 2, heads: int = 1) -> nn.Module:
    return ConvNeXt(width, depth)


# ----------------------------------------------------------------- MLP-Mixer


class MixerBlock(nn.Module):
    def __init__(self, dim: int, patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_mixing = nn.Sequential(nn.Linear(patches, 20), nn.GELU(), nn.Linear(20, patches))
        self.channel_mixing = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mixing(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mixing(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 8, 8)
        self.blocks = nn.ModuleList([MixerBlock(dim, (SIDE // 8) ** 2) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def mixer(width: int = 24, depth: int = 2, heads: int = 1) -> nn.Module:
    return MLPMixer(width, depth)


# ----------------------------------------------------------------- a U-Net


class UNetBlock(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """GroupNorm, skips by concatenation, strides down and nearest neighbours up."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = UNetBlock(width, width)
        self.pool = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.down2 = UNetBlock(2 * width, 2 * width)
        self.middle = nn.Sequential(*[UNetBlock(2 * width, 2 * width) for _ in range(depth)])
        self.up2 = UNetBlock(4 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = UNetBlock(2 * width, width)
        self.out = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(self.conv_in(x))
        second = self.down2(self.pool(first))
        h = self.up2(torch.cat([self.middle(second), second], dim=1))
        return self.out(self.up1(torch.cat([self.up(h), first], dim=1)))


def unet(width: int = 8, depth: int = 1, heads: int = 1) -> nn.Module:
    return UNet(width, depth)
