"""The sizes of a tiny model, and by what a column of the survey grows them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny model: what it begins with, and by what a column grows it."""

    width: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    ffn: int = 80
    layers: int = 2
    # Widths of stages are multiples of this.
    channels: int = 8
    # What a column grows: factors, and a number of layers more.
    wider: Fraction = Fraction(1)
    more_heads: Fraction = Fraction(1)
    more_ffn: Fraction = Fraction(1)
    deeper: int = 0
    # The one part of a config that a column grows, by the name of its field; if none, it grows all.
    only: str = ""
    # By what the width of the text grows, which other parts lead to; if none is given, as all widths.
    wider_text: Fraction | None = None

    @property
    def half(self) -> int:
        """Of the width, which sines and cosines make up."""
        return self.width // 2

    @property
    def sixth(self) -> int:
        """Of the width, which six coordinates of a box on a page make up."""
        return self.width // 6

    def grown(self, moved: str, value: int) -> int:
        """A size that this factor moves, grown."""
        text = self.wider if self.wider_text is None else self.wider_text
        factors = {"width": self.wider, "heads": self.more_heads, "ffn": self.more_ffn, "text": text}
        return int(value * factors.get(moved, Fraction(1)))

    def inside(self, part: str, fields: Collection[str] = ()) -> Sizes:
        """The sizes of a part of a config that has these fields: they grow if it is the part that grows."""
        if not self.only or self.only in fields:
            return self
        text = self.wider if self.only == "text_config" else Fraction(1)
        if part == self.only:
            return replace(self, only="", wider_text=text)
        still = Fraction(1)
        return replace(self, wider=still, more_heads=still, more_ffn=still, deeper=0, only="", wider_text=text)


# Tried in this order until one builds and runs: most models take the first; some want as many key heads as query heads,
# some norm their channels in 32 groups, some divide by 64.
BASES = (
    Sizes(),
    Sizes(width=64, head_dim=16, kv_heads=4, ffn=128, channels=32),
    Sizes(kv_heads=4),
    Sizes(width=128, heads=2, kv_heads=2, head_dim=64, ffn=256, channels=128),
)
