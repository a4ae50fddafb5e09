"""The pictures of docs/how-it-works.md: weights of real modules before and after `lemonx.grow`, as SVG.

python docs/make/pictures.py            say what would be drawn
python docs/make/pictures.py --write    draw docs/pictures/*.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape

import pages
import torch
from torch import Tensor, nn

import lemonx

PICTURES = pages.ROOT / "docs" / "pictures"
CELL, GAP, TEXT = 26, 56, 13
# Units of the source, and what is neither a unit nor a copy of one.
COLOURS = ("#0062a8", "#b4480a", "#00725a", "#96357f")
NEUTRAL = "#8a8f98"


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, hidden, bias=False), nn.Linear(hidden, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """A residual stream with a LayerNorm at its end."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Drawing:
    """Parts of an SVG, and how far they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width = self.height = 0.0

    def text(self, x: float, y: float, content: str, *, colour: str = "#3a3f47", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{escape(content)}</text>'
        )
        end = x + 7 * len(content) * {"start": 1, "middle": 0.5, "end": 0}[anchor]
        self.width, self.height = max(self.width, end), max(self.height, y + 6)

    def box(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        self.parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="3" fill="{fill}" '
            f'fill-opacity="{opacity:.2f}" stroke="#c8cad0"/>'
        )
        self.width, self.height = max(self.width, x + width), max(self.height, y + height)

    def matrix(
        self, x: float, y: float, title: str, values: Tensor, rows: Sequence[str], columns: Sequence[str]
    ) -> float:
        """A matrix whose cells are as strong as their values; rows and columns have the colours of their units."""
        self.text(x, y, title)
        top, largest = y + 14, float(values.abs().max())
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                colour = rows[i] if len(set(rows)) > 1 else columns[j]
                self.box(x + j * CELL, top + i * CELL, CELL - 3, CELL - 3, colour, abs(value) / largest)
        return x + CELL * values.shape[1] + GAP

    def svg(self, title: str) -> str:
        size = f"{self.width + 16:.0f} {self.height + 12:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" font-family="sans-serif" '
            f'font-size="{TEXT}"><title>{escape(title)}</title><rect width="100%" height="100%" fill="#ffffff"/>'
            f"{''.join(self.parts)}</svg>\n"
        )


def origins(grown: Tensor, source: Tensor) -> list[int]:
    """For each row of a grown matrix the row of the source that it is a copy of, or -1."""
    return [next((j for j, old in enumerate(source) if torch.allclose(row, old, atol=1e-2)), -1) for row in grown]


def colours(units: Sequence[int]) -> list[str]:
    return [NEUTRAL if unit < 0 else COLOURS[unit % len(COLOURS)] for unit in units]


def units() -> str:
    """Hidden units 4 to 6: rows that compute a unit are copied, columns that read it share its weight."""
    torch.manual_seed(1)
    small, large = Mlp(4), Mlp(6)
    lemonx.grow(small, large, torch.randn(5, 3))
    drawing, plain = Drawing(), [NEUTRAL] * 3
    of = origins(large.up.weight.detach(), small.up.weight.detach())
    before, after = colours(range(4)), colours(of)
    x = drawing.matrix(16, 22, "up: 4 units", small.up.weight.detach(), before, plain)
    x = drawing.matrix(x, 22, "down", small.down.weight.detach(), plain, before)
    drawing.text(x - GAP / 2, 22 + 3 * CELL, "->", anchor="middle")
    x = drawing.matrix(x, 22, "up: 6 units", large.up.weight.detach(), after, plain)
    drawing.matrix(x, 22, "down", large.down.weight.detach(), plain, after)
    assert sorted(of) == [0, 0, 1, 1, 2, 3], of
    return drawing.svg("Duplicated hidden units: equal rows in, columns that add up out")


def stream() -> str:
    """A residual stream 4 to 6 under a LayerNorm: what is left over holds the mean, which no LayerNorm sees."""
    torch.manual_seed(2)
    small, large = Tower(4, 1), Tower(6, 1)
    lemonx.grow(small, large, torch.randint(5, (3, 7)))
    old, new = small.embed.weight.detach(), large.embed.weight.detach()
    of = origins(new.T / new[0, 0] * old[0, 0], old.T)
    assert of[:4] == [0, 1, 2, 3] and of[4:] == [-1, -1], of
    mean = new[:, :4].mean(1, keepdim=True)
    assert torch.allclose(new[:, 4:], mean.expand(-1, 2), atol=1e-5)
    drawing = Drawing()
    x = drawing.matrix(16, 22, "embedding: width 4", old, [NEUTRAL] * 5, colours(range(4)))
    drawing.text(x - GAP / 2, 22 + 3 * CELL, "->", anchor="middle")
    drawing.matrix(x, 22, "embedding: width 6", new, [NEUTRAL] * 5, colours(of))
    return drawing.svg("A residual stream at a width that is not a multiple: the new entries hold the mean")


def depth() -> str:
    """Two blocks to four: what each adds to the stream."""
    torch.manual_seed(3)
    small, large = Tower(4, 2), Tower(4, 4)
    tokens = torch.randint(5, (3, 7))
    lemonx.grow(small, large, tokens)
    drawing = Drawing()
    for model, top, name in ((small, 40, "2 blocks"), (large, 130, "4 blocks")):
        drawing.text(16, top - 14, name)
        x = model.embed(tokens).detach()
        for place, block in enumerate(model.blocks):
            with torch.no_grad():
                x, before = block(x), x
            added = float((x - before).norm() / before.norm())
            left = 16 + 150 * place
            drawing.box(left, top, 130, 36, COLOURS[0] if added else NEUTRAL, 0.35 if added else 0.1)
            drawing.text(left + 65, top + 23, f"adds {added:.0%}" if added else "adds 0", anchor="middle")
    return drawing.svg("New blocks add nothing to the residual stream at first")


ALL = {"units": units, "stream": stream, "depth": depth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="draw docs/pictures/*.svg")
    options = parser.parse_args()
    for name, draw in ALL.items():
        text, path = draw(), PICTURES / f"{name}.svg"
        print(f"{path.relative_to(pages.ROOT)}: {draw.__doc__}")
        if options.write:
            PICTURES.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
