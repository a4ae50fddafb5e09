"""The sizes of a tiny model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny model; classes whose fields go by other names take the nearest of these."""

    width: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    ffn: int = 80
    layers: int = 2
    # Widths of stages are multiples of this.
    channels: int = 8

    @property
    def half(self) -> int:
        """Of the width, which sines and cosines make up."""
        return self.width // 2

    @property
    def sixth(self) -> int:
        """Of the width, which six coordinates of a box on a page make up."""
        return self.width // 6


# Tried in this order until one builds and runs: most models take the first; some want as many key heads as query heads,
# some norm their channels in 32 groups, some divide by 64.
BASES = (
    Sizes(),
    Sizes(width=64, head_dim=16, kv_heads=4, ffn=128, channels=32),
    Sizes(kv_heads=4),
    Sizes(width=128, heads=2, kv_heads=2, head_dim=64, ffn=256, channels=128),
)
