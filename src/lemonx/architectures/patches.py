"""How many patches an image has: config.json gives a side, or a height and a width."""

from typing import Any

from lemonx.errors import Refused
from lemonx.specs.config import Config


def grid(c: Config, part: str = "", *, square: bool = False) -> tuple[int, int]:
    """Patches along the height and the width; `square`: the family's code knows one side only."""
    image, patch = c[f"{part}image_size"], c[f"{part}patch_size"]
    if square and not (isinstance(image, int) and isinstance(patch, int)):
        raise Refused(
            f"{part}image_size is {image} and {part}patch_size {patch}, but transformers builds this family for "
            "square images only",
            "give one number for each",
        )
    (high, wide), (high_patch, wide_patch) = _sides(image), _sides(patch)
    return high // high_patch, wide // wide_patch


def count(c: Config, part: str = "", *, square: bool = False) -> int:
    """Patches in all."""
    high, wide = grid(c, part, square=square)
    return high * wide


def merged(c: Config, times: int) -> int:
    """Patches in all when two by two of them became one so many times; what is odd is padded, each time.

    >>> [merged(Config({"image_size": [34, 32], "patch_size": 4}, {}), times) for times in range(3)]
    [72, 20, 6]
    """
    (high, wide), (high_patch, wide_patch) = _sides(c["image_size"]), _sides(c["patch_size"])
    return -(-high // (high_patch << times)) * -(-wide // (wide_patch << times))


def _sides(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    high, wide = size
    return high, wide
