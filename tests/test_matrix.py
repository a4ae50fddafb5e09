"""The matrix of what can grow agrees with what the families' tests find."""

from __future__ import annotations

from pathlib import Path

import pytest

from lemonx import architectures
from lemonx.cli.render import catalogue as show
from lemonx.diagnostics.capabilities import COLUMNS, EXACT, NONE, REFUSED, matrix


@pytest.fixture(scope="module")
def cells() -> dict[str, dict[str, str]]:
    return matrix()


def test_every_family_has_every_column(cells: dict[str, dict[str, str]]) -> None:
    assert cells.keys() == architectures.families().keys()
    for row in cells.values():
        assert tuple(row) == COLUMNS
        assert all(cell == NONE or cell.startswith((EXACT, REFUSED)) for cell in row.values())


def test_what_is_refused(cells: dict[str, dict[str, str]]) -> None:
    """What stops an indivisible width is argued in docs/errata.md, family by family."""
    refused = {(name, column) for name, row in cells.items() for column in row if row[column].startswith(REFUSED)}
    argued = {"bart", "swinv2", "whisper", "convnext"}
    # The positions of a Marian are computed from its width.
    marian = {("marian", column) for column in ("width x2", "width x1.5", "heads", "head_dim")}
    assert {pair for pair in refused if "width" in pair[1]} - marian == {(name, "width x1.5") for name in argued}
    assert not {pair for pair in refused if "width" not in pair[1]} - marian
    assert marian < refused
    assert "swinv2.layernorm" in cells["swinv2"]["width x1.5"]
    assert "self_attn_layer_norm" in cells["bart"]["width x1.5"] and "no MLP" in cells["bart"]["width x1.5"]


def test_conditions_are_said(cells: dict[str, dict[str, str]]) -> None:
    assert "eps = 1e-12" in cells["bert"]["depth"]
    assert "eps = 1e-05" in cells["bart"]["depth"] and cells["t5"]["depth"] == EXACT
    assert cells["bert"]["width x1.5"].startswith("exact, by frames, not with every head")
    assert cells["albert"]["width x1.5"] == "exact, by frames"
    assert "by frames" in cells["swin"]["width x1.5"] and "by frames" in cells["siglip"]["width x1.5"]
    assert cells["bloom"]["width x1.5"] == "exact, with tie_word_embeddings=false, by frames"
    assert "no gradient" in cells["qwen3"]["head_dim"] and "no gradient" not in cells["llama"]["head_dim"]
    assert "with weights of its own for every block, up to eps" in cells["albert"]["depth"]
    assert "no gradient" in cells["swinv2"]["head_dim"]
    assert "not with every head" in cells["megatron-bert"]["width x1.5"]
    assert cells["gpt2"]["heads"] == "exact, together with the width"
    assert cells["llama"]["width x1.5"] == cells["mistral"]["kv_heads"] == EXACT


def test_it_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    content = show.architectures_json()
    show.print_architectures(content)
    printed = capsys.readouterr().out
    assert all(entry["model_type"] in printed for entry in content)
    assert "[1]" in printed


def test_the_page_of_families_carries_it(cells: dict[str, dict[str, str]]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "families.md").read_text()
    assert f"<!-- matrix -->\n{show.architectures_markdown(cells)}\n<!-- /matrix -->" in page, "run `make table`"
