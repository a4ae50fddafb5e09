"""The matrix of what can grow agrees with what the families' tests find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lemonx import architectures
from lemonx.cli.render import catalogue as show
from lemonx.diagnostics import stored_matrix
from lemonx.diagnostics.capabilities import COLUMNS, Cell, Verdict, matrix

Cells = dict[str, dict[str, Cell]]


@pytest.fixture(scope="module")
def cells() -> Cells:
    return matrix()


def test_every_family_has_every_column(cells: Cells) -> None:
    assert cells.keys() == architectures.families().keys()
    for row in cells.values():
        assert tuple(row) == COLUMNS
        for cell in row.values():
            assert (cell.refusal is not None) == (cell.verdict is Verdict.REFUSED)
            assert (cell.target is None) == (cell.verdict is Verdict.NONE)
            assert cell.verdict is Verdict.EXACT or not cell.notes
            assert cell.refusal is None or (cell.refusal.found and cell.refusal.remedy)


def test_what_is_refused(cells: Cells) -> None:
    """What stops an indivisible width is argued in docs/errata.md, family by family."""
    refused = {(name, column) for name, row in cells.items() for column in row if row[column].refusal}
    argued = {"bart", "swinv2", "whisper", "convnext"}
    # The positions of a Marian are computed from its width.
    marian = {("marian", column) for column in ("width x2", "width x1.5", "heads", "head_dim")}
    assert {pair for pair in refused if "width" in pair[1]} - marian == {(name, "width x1.5") for name in argued}
    assert not {pair for pair in refused if "width" not in pair[1]} - marian
    assert marian < refused
    assert "swinv2.layernorm" in cells["swinv2"]["width x1.5"].note
    assert "self_attn_layer_norm" in cells["bart"]["width x1.5"].note and "no MLP" in cells["bart"]["width x1.5"].note


def test_conditions_are_said(cells: Cells) -> None:
    def notes(name: str, column: str) -> tuple[str, ...]:
        assert cells[name][column].verdict is Verdict.EXACT
        return cells[name][column].notes

    assert "eps = 1e-12" in cells["bert"]["depth"].note
    assert "eps = 1e-05" in cells["bart"]["depth"].note and notes("t5", "depth") == ()
    framed, heads = notes("bert", "width x1.5")
    assert framed == "by a change of basis" and heads.startswith("not with every head")
    assert notes("albert", "width x1.5") == ("by a change of basis",)
    assert "by a change of basis" in notes("swin", "width x1.5") and "by a change of basis" in notes(
        "siglip", "width x1.5"
    )
    assert notes("bloom", "width x1.5") == ("with tie_word_embeddings=false", "by a change of basis")
    assert "no gradient" in cells["qwen3"]["head_dim"].note and "no gradient" not in cells["llama"]["head_dim"].note
    assert "with weights of its own for every layer, up to eps" in cells["albert"]["depth"].note
    assert "no gradient" in cells["swinv2"]["head_dim"].note
    assert "not with every head" in cells["megatron-bert"]["width x1.5"].note
    assert notes("gpt2", "heads") == ("together with the width",)
    assert notes("llama", "width x1.5") == notes("mistral", "kv_heads") == ()


def test_it_can_be_printed(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    show.print_architectures(cells)
    printed = capsys.readouterr().out
    assert all(name in printed for name in cells)
    assert "[1]" in printed


def test_it_can_be_read_by_programs(cells: Cells) -> None:
    content = json.loads(json.dumps(show.architectures_json(cells)))
    assert [entry["model_type"] for entry in content] == list(cells)
    grows = {entry["model_type"]: entry["grows"] for entry in content}
    assert grows["albert"]["width x1.5"] == {"verdict": "exact", "notes": ["by a change of basis"], "refusal": None}
    refusal = grows["bart"]["width x1.5"]["refusal"]
    assert refusal["found"] and refusal["remedy"] and refusal["file"] is None


def test_it_is_stored_as_the_type_check_says(cells: Cells) -> None:
    """`lemonx architectures` reads it from a file, as the type check takes many seconds."""
    assert stored_matrix.FILE.read_text(encoding="utf-8") == stored_matrix.matrix_text(cells), "run `make table`"
    stored = stored_matrix.stored_matrix()
    assert [[cell.as_dict() for cell in row.values()] for row in stored.values()] == [
        [cell.as_dict() for cell in row.values()] for row in cells.values()
    ]


def test_the_page_of_families_carries_it(cells: Cells) -> None:
    page = (Path(__file__).parents[1] / "docs" / "families.md").read_text()
    assert f"<!-- matrix -->\n{show.architectures_markdown(cells)}\n<!-- /matrix -->" in page, "run `make table`"
