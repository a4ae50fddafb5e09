"""What the entries of an expanded vector hold, and the blocks of neighbours in which they are read and written."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Fill(IntEnum):
    """What an entry of the target holds if it copies no entry of the source.

    An expansion keeps it in place of a source index, so every value is negative. The order is a precedence: where axes
    are fused and an entry has a fill on both, it holds the later one (`product`), which fewer modules can handle.
    """

    ZERO = -1
    AVG = -2  # the mean of all entries
    RAND = -3  # anything: nobody reads it yet
    PART = -4  # the mean of one part of a fused axis, which nothing can write or norm, but a linear map may ignore
    WEIGHED = -5  # in front of a scale for every channel: what that scale turns into the mean
    DENSE = -6  # a sum of several entries (algebra/dense.py)
    SPARE = -7  # a unit beside all copies, with weights from a rule of its own


def remainder(kind: str) -> Fill | None:
    """What the entries behind whole copies hold, by the kind of the space; None if they are copies too."""
    return {"avg": Fill.AVG, "zero": Fill.ZERO, "rand": Fill.RAND, "scaled": Fill.WEIGHED}.get(kind)


class Run(NamedTuple):
    """Consecutive target indices `target..target+length` that copy consecutive source indices.

    `source` is the first source index, or a Fill; `copy` is 0 where these are the first copies of their
    units, 1 for the second copies, and so on.
    """

    target: int
    source: int
    length: int
    copy: int

    @property
    def is_copy(self) -> bool:
        """Whether these entries are copies of units."""
        return self.source >= 0

    @property
    def is_zero(self) -> bool:
        return self.source == Fill.ZERO

    @property
    def is_mean(self) -> bool:
        """Whether these entries hold the mean of all units."""
        return self.source == Fill.AVG

    @property
    def is_weighed_mean(self) -> bool:
        """Whether a scale behind these entries turns them into the mean."""
        return self.source == Fill.WEIGHED

    @property
    def is_free(self) -> bool:
        """Whether these entries may hold anything."""
        return self.source == Fill.RAND

    @property
    def is_dense(self) -> bool:
        """Whether these entries are in a frame."""
        return self.source == Fill.DENSE

    @property
    def is_spare(self) -> bool:
        return self.source == Fill.SPARE

    @property
    def needs_every_unit(self) -> bool:
        """Whether these entries are made from many units of the source: from a mean, or in a frame."""
        return self.is_mean or self.is_weighed_mean or self.is_dense

    @property
    def units(self) -> slice:
        """The units that they copy."""
        return slice(self.source, self.source + self.length)


class Split(NamedTuple):
    """Copies at `target..target+length` of consecutive units whose base copies stand at `base..`; `copies` in all."""

    target: int
    base: int
    length: int
    copies: int
