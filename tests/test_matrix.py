"""The matrix of what can grow agrees with what the families' tests find."""

from __future__ import annotations

import pytest

from lemonx import architectures
from lemonx.matrix import COLUMNS, EXACT, NONE, REFUSED, matrix
from lemonx.show import catalogue as show


@pytest.fixture(scope="module")
def cells() -> dict[str, dict[str, str]]:
    return matrix()


def test_every_family_has_every_column(cells: dict[str, dict[str, str]]) -> None:
    assert cells.keys() == architectures.families().keys()
    for row in cells.values():
        assert tuple(row) == COLUMNS
        assert all(cell == NONE or cell.startswith((EXACT, REFUSED)) for cell in row.values())


def test_what_is_refused(cells: dict[str, dict[str, str]]) -> None:
    """What stops an indivisible width: a final norm after Res-Post-Norm, of which frames can feed one, not all."""
    refused = {(name, column) for name, row in cells.items() for column in row if row[column].startswith(REFUSED)}
    assert {(name, column) for name, column in refused if "width" in column} == {
        ("swinv2", "width x1.5"),
    }
    assert not {pair for pair in refused if "width" not in pair[1]}
    assert "swinv2.layernorm" in cells["swinv2"]["width x1.5"]


def test_conditions_are_said(cells: dict[str, dict[str, str]]) -> None:
    assert "eps = 1e-12" in cells["bert"]["depth"]
    assert cells["bert"]["width x1.5"].startswith("exact, by frames, not with every head")
    assert cells["bloom"]["width x1.5"] == "exact, with tie_word_embeddings=false, by frames"
    assert "no gradient" in cells["qwen3"]["head_dim"] and "no gradient" not in cells["llama"]["head_dim"]
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
