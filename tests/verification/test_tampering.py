"""Whatever is changed in a target so that it computes something else is noticed, and told where it is.

Whether a change has an effect is measured with transformers alone, in float64, on inputs that hold every token, every
position and every type of token that the source knows. `make tampering` does the same to more families, and counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import tampering
from tampering import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_some_entries_of_every_tensor(case: Case, tmp_path: Path) -> None:
    with tampering.grown(case, tmp_path) as made:
        assert made.algebra().passed
        caught, free = tampering.sorted_out(made, 1)
        assert len(caught) > len(made.target.tensors) / 3
        with tampering.all_of(free):
            assert made.algebra().passed
            # All at once, what was let pass changes nothing.
            assert made.effect() <= made.tolerance, [str(change) for change in free]
        assert made.algebra().passed
