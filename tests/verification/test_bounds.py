"""Runs on inputs that lemonx chose stay small, however fast a module's work grows with the size of its input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lemonx.verification.modules import Example, outputs
from lemonx.verification.variations import LARGEST, Bounded, TooMuch, variations

# Attention over the pixels of a picture, whose work grows with the fourth power of the picture's side.
PIXELS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
import torch, lemonx
sys.path.insert(0, {here!r})
from test_bounds import Pixels
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lemonx.grow(Pixels(128), Pixels(192), torch.randn(2, 3, 16, 16))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


class Pixels(torch.nn.Module):
    """One layer of attention in which every pixel reads every other, and an MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = torch.nn.Conv2d(3, 16, 1)
        self.up, self.down = torch.nn.Linear(16, hidden), torch.nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embed(x).flatten(2).transpose(1, 2)
        found = found + torch.softmax(found @ found.transpose(1, 2), -1) @ found
        return self.down(torch.relu(self.up(found)))


def test_growing_a_module_that_attends_to_pixels_takes_little_memory() -> None:
    """Pictures of 192 x 192 pixels, as wide as the module becomes, would take 20 GB."""
    code = PIXELS.format(here=str(Path(__file__).parent))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert int(ran.stdout) < 800, f"{ran.stdout} MB"


def test_no_tensor_is_made_before_its_size_is_known() -> None:
    long = torch.ones(2**12, 1)
    with Bounded() as seen:
        made = long @ long.T[:, : 2**10]
        assert seen.largest == made.numel() == 2**22
        for too_much in (
            lambda: long @ long.T,
            lambda: torch.zeros(2**40),
            lambda: torch.fft.fft(torch.ones(4), n=2**32),
            lambda: long.expand(-1, 2**40).clone(),
        ):
            with pytest.raises(TooMuch):
                too_much()


def test_the_work_of_a_run_adds_up() -> None:
    one = torch.ones(1000)
    with pytest.raises(TooMuch, match="more than 5000 entries"), Bounded(work=5000):
        for _ in range(5):
            one = one + 1
        one + 1


def test_lengths_beyond_the_bounds_are_left_out_and_shorter_ones_are_tried() -> None:
    inputs = [Example((torch.randn(2, 3, 16, 16),), {})]
    small, large = Pixels(128).double(), Pixels(192).double()
    sides = [example.args[0].shape[-1] for example, _ in variations(small, large, inputs, outputs)]
    assert max(sides) > 16 and min(sides) == 1 and 2 * max(sides) ** 4 <= LARGEST


def test_a_large_example_of_the_caller_is_not_too_much() -> None:
    """Attention over 48 x 48 pixels makes more entries than lemonx chooses; examples of that size are still varied."""
    inputs = [Example((torch.randn(2, 3, 48, 48),), {})]
    small, large = Pixels(128).double(), Pixels(192).double()
    assert LARGEST < 2 * 48**4
    assert any(example.args[0].shape[0] == 1 for example, _ in variations(small, large, inputs, outputs))
