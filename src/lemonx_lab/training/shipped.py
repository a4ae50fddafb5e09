"""The recipes that come with lemonx."""

from __future__ import annotations

from pathlib import Path

from lemonx.errors import BadRecipe

SHIPPED = Path(__file__).resolve().parents[1] / "recipes"


def found(path: Path) -> Path:
    """The file itself, or the recipe of this name that ships."""
    shipped = SHIPPED / f"{path}.yaml"
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    if not shipped.is_file():
        raise BadRecipe(
            "is neither a file nor the name of a recipe",
            "`lemonx train --list` names the recipes that come with lemonx",
            file=path,
        )
    return shipped


def shipped() -> dict[str, str]:
    """Every recipe that ships: its name and the comment that it begins with."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(SHIPPED.glob("*.yaml"))}
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in texts.items()}
