"""The survey of all model types: tiny models are what they should be, and no growth is called what it is not."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lemonx.cli import main
from lemonx.cli.render.survey import survey_markdown
from lemonx.cli.surveying import by_table
from lemonx.diagnostics.survey import classes, measuring, pool, record
from lemonx.diagnostics.survey.configs import tiny_config
from lemonx.diagnostics.survey.fields import BASES, Sizes, tiny
from lemonx.diagnostics.survey.inputs import Batch
from lemonx.diagnostics.survey.measuring import (
    COLUMNS,
    EXACT,
    FAILED,
    NONE,
    REFUSED,
    WRONG,
    Cell,
    Row,
    difference,
    measure,
)
from lemonx.diagnostics.survey.randomise import randomise
from lemonx.diagnostics.survey.running import find_inputs, outputs, unread
from lemonx.errors import BadData, Refused
from lemonx.models.foreign import foreign

WIDER, DEEPER = COLUMNS["width x2"](Sizes()), COLUMNS["depth"](Sizes())


@pytest.mark.parametrize(
    ("name", "value", "small", "wide"),
    [
        ("hidden_size", 4096, 48, 96),
        ("num_attention_heads", 32, 4, 8),
        ("num_key_value_heads", 8, 2, 4),
        ("intermediate_size", 11008, 80, 160),
        ("head_dim", 128, 12, 12),
        ("num_hidden_layers", 32, 2, 2),
        ("vocab_size", 128256, 97, 97),
        ("num_heads", [3, 6, 12], [2, 4, 8], [4, 8, 16]),
        ("depths", [2, 2, 18, 2], [2, 2, 2, 2], [2, 2, 2, 2]),
        ("conv_kernel", [10, 3, 3], [10, 3, 3], [10, 3, 3]),
        ("layer_norm_eps", 1e-5, 1e-5, 1e-5),
        ("use_cache", True, True, True),
    ],
)
def test_a_size_is_told_from_its_name(name: str, value: Any, small: Any, wide: Any) -> None:
    assert tiny(name, value, Sizes()) == small
    assert tiny(name, value, WIDER) == wide


def test_lists_for_layers_keep_one_of_every_kind() -> None:
    config, deeper = (tiny_config("gemma3_text", sizes) for sizes in (Sizes(), DEEPER))
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert deeper.layer_types == config.layer_types * 2
    assert len(tiny_config("qwen3_next", Sizes()).layer_types) == tiny_config("qwen3_next", Sizes()).num_hidden_layers


def test_special_tokens_are_in_the_vocabulary_and_apart() -> None:
    config = tiny_config("qwen2_5_vl", Sizes())
    ids = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    assert len(set(ids)) == 4 and all(id < config.text_config.vocab_size for id in ids)


# One of each kind of input and of wiring: texts, pictures, both in one, sounds, experts, scans, series, a detector.
RUN = {
    "llama": "input_ids",
    "t5": "decoder_input_ids",
    "deepseek_v3": "input_ids",
    "mamba2": "input_ids",
    "vit": "pixel_values",
    "qwen2_5_vl": "video_grid_thw",
    "whisper": "input_features",
    "wav2vec2": "input_values",
    "deformable_detr": "pixel_mask",
    "patchtst": "past_values",
}
# The whole of a Whisper is not its decoder, which stands alone as a language model.
TASK = {"whisper": "SPEECH_SEQ_2_SEQ"}


@pytest.mark.parametrize("model_type", RUN)
def test_a_tiny_model_runs_on_inputs_that_read_all_of_it(model_type: str) -> None:
    task = TASK.get(model_type) or classes.tasks(model_type)[0]
    model_class = classes.class_for(model_type, task)
    with foreign("run it", "look"):
        base = BASES[1] if model_type == "deformable_detr" else BASES[0]
        model = classes.build(model_class, model_type, base)
        randomise(model, 0)
        batch, failed = find_inputs(model)
        assert not failed and RUN[model_type] in batch
        share, silent = unread(model, batch)
        assert share >= 0.98, silent
        for column in ("width x2", "width x1.5", "depth"):
            large = classes.build(model_class, model_type, COLUMNS[column](base))
            grown = {name: p.numel() for name, p in large.named_parameters()}
            assert sum(grown.values()) > sum(p.numel() for p in model.parameters())
            outputs(large, batch)


def test_the_share_that_is_read_does_not_count_what_is_not() -> None:
    with foreign("run it", "look"):
        model = classes.build(classes.class_for("clip", "IMAGE_CLASSIFICATION"), "clip", Sizes())
        randomise(model, 0)
        share, silent = unread(model, find_inputs(model)[0])
    norm = model.vision_model.post_layernorm
    assert silent == ["vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias"]
    assert share == 1 - sum(p.numel() for p in norm.parameters()) / sum(p.numel() for p in model.parameters())


def leaves_alone(small: Any, large: Any, inputs: Batch) -> None:
    """Claims to have filled the larger model, and did not."""


def refuses(small: Any, large: Any, inputs: Batch) -> None:
    raise Refused("it is not to be")


def breaks(small: Any, large: Any, inputs: Batch) -> None:
    raise ValueError("a mistake")


def test_a_row_says_what_each_growth_came_to() -> None:
    ways = {"table": by_table, "false": leaves_alone, "refused": refuses, "broken": breaks}
    with foreign("survey it", "look"):
        row = measure("gpt2", "CAUSAL_LM", ways)
    assert row.built and row.ran and row.share == 1.0 and row.model_class == "GPT2LMHeadModel"
    # GPT-2's heads make up its width: more of them are no growth.
    wanted = {"width x2", "width x1.5", "depth", "ffn"}
    kinds = {way: {column: cell.kind for column, cell in cells.items()} for way, cells in row.cells.items()}
    for way, kind in (("table", EXACT), ("false", WRONG), ("refused", REFUSED), ("broken", FAILED)):
        assert kinds[way] == {column: kind if column in wanted else NONE for column in COLUMNS}, row.cells[way]
    assert all(
        cell.difference is not None and cell.difference < 1e-12
        for cell in row.cells["table"].values()
        if cell.difference
    )
    assert row.cells["refused"]["depth"].why == "it is not to be" and "a mistake" in row.cells["broken"]["depth"].why


def test_what_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("no such layer")

    monkeypatch.setattr(measuring.classes, "build", fail)
    with foreign("survey it", "look"):
        row = measure("gpt2", "CAUSAL_LM", {})
    assert not row.built and not row.ran and row.why == "cannot be built: no such layer"


@pytest.mark.parametrize(
    ("x", "y", "found"),
    [
        ([1.0, 2.0], [1.0, 2.0, 5.0], 0.0),  # a wider output begins with the narrow one
        ([1.0, 2.0], [1.0, 2.5], 0.25),
        ([1.0, 2.0], [1.0], float("inf")),
        ([1.0, float("-inf")], [1.0, float("-inf")], 0.0),  # masked logits
        ([1.0, float("-inf")], [1.0, 0.0], float("inf")),
        ([1.0, 2.0], [1.0, float("nan")], float("inf")),
    ],
)
def test_differences(x: list[float], y: list[float], found: float) -> None:
    assert difference(torch.tensor(x), torch.tensor(y)) == found


def waits(small: Any, large: Any, inputs: Batch) -> None:
    import time

    time.sleep(600)


def dies(small: Any, large: Any, inputs: Batch) -> None:
    print("this is not seen", flush=True)
    os._exit(3)


def test_each_type_has_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    job = ("gpt2", "CAUSAL_LM")
    here = {name: {name: (__name__, name)} for name in ("leaves_alone", "dies")}
    (good,) = pool.survey([job], lambda _: here["leaves_alone"])
    assert good.cells["leaves_alone"]["depth"].kind == WRONG
    (gone,) = pool.survey([job], lambda _: here["dies"])
    assert gone.why == "the process ended by itself (3)"
    (late,) = pool.survey([job], lambda _: {"waits": (__name__, "waits")}, seconds=3)
    assert late.why == "stopped after 3 seconds"
    assert "this is not seen" not in capfd.readouterr().out


def row(model_type: str, **more: Any) -> Row:
    cells = {column: Cell(EXACT, 1e-15) for column in COLUMNS}
    return Row(model_type, "CAUSAL_LM", built=True, share=1.0, inputs=("input_ids",), cells={"table": cells, **more})


def test_the_better_of_two_ways_counts() -> None:
    refused = {column: Cell(REFUSED, why="it cannot") for column in COLUMNS}
    assert record.best(row("a", inferred=refused))["depth"].kind == EXACT
    # A growth that is wrong is worth more notice than one that was refused.
    wrong = {column: Cell(WRONG, 0.1, "differs") for column in COLUMNS}
    assert record.best(replace(row("a"), cells={"table": refused, "inferred": wrong}))["ffn"].kind == WRONG


def test_counts_by_task_and_by_type() -> None:
    half = replace(row("b"), share=0.5)
    gone = Row("c", "MASKED_LM", why="does not run: 12 is not 13")
    also = replace(row("a"), task="MASKED_LM", cells={})
    found = record.counts([row("a"), half, gone, also])
    assert found["CAUSAL_LM"]["depth"] == 2 and found["CAUSAL_LM"]["depth, whole"] == 1
    assert found["MASKED_LM"] == {"surveyed": 2, "built": 1, "ran": 1, "read": 1}
    assert found["all"]["surveyed"] == 3 and found["all"]["built"] == 2 and found["all"]["read"] == 1


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [row("a"), Row("b", "CTC", why="no")]
    record.write(tmp_path / "record.json", rows)
    assert record.read(tmp_path / "record.json") == rows
    assert record.read(tmp_path / "none.json") == []
    (tmp_path / "record.json").write_text("[1]")
    with pytest.raises(BadData, match="is not a record of a survey"):
        record.read(tmp_path / "record.json")


def test_what_is_recorded_is_printed_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = {column: Cell(REFUSED, why="it cannot") for column in COLUMNS}
    record.write(tmp_path / "r.json", [replace(row("gpt2"), cells={"inferred": refused})])
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["lemonx", "architectures", "--all", "--type", "gpt2", "--record", str(tmp_path / "r.json")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr().out
    assert not ended.value.code and max(map(len, printed.splitlines())) <= 80
    assert "causal lm: 1 model types, of which 1 run" in printed
    assert re.search(r"gpt2 +refused +refused +refused +refused +refused +100 %", printed)


def test_a_page_has_the_reasons_as_notes() -> None:
    refused = {column: Cell(REFUSED, why="it | cannot\n<b>") for column in COLUMNS}
    page = survey_markdown([replace(row("gpt2"), cells={"inferred": refused}), Row("b", "CTC", why="does not run: no")])
    assert (
        "| `gpt2` | causal lm | refused (1) | refused (1) | refused (1) | refused (1) | refused (1) | 100 % |" in page
    )
    assert "1. it \\| cannot &lt;b>" in page and "- `b` (ctc): does not run: no" in page
