"""The survey of all model types: tiny models are what they should be, and no growth is called what it is not."""

from __future__ import annotations

import copy
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
from lemonx.cli import main
from lemonx.errors import BadData, LemonxError
from lemonx.inference.size_names import tiny
from lemonx.inference.tiny_sizes import BASES, Sizes
from lemonx.models.foreign import foreign
from lemonx.verification.float64 import Float64
from lemonx.verification.media import LENGTH, find_inputs, outputs
from lemonx.verification.modules import relative_difference
from lemonx_lab.survey import by_command as surveying
from lemonx_lab.survey import classes, counting, measuring, pool
from lemonx_lab.survey.configs import tiny_config
from lemonx_lab.survey.measuring import Grown, judged, learned, measure, read_by
from lemonx_lab.survey.randomise import randomise
from lemonx_lab.survey.rows import (
    COLUMNS,
    EXACT,
    FAILED,
    NOT_COMPARED,
    NOT_VERIFIED,
    REFUSED,
    UP_TO_EPS,
    WRONG,
    Cell,
    Record,
    Row,
)


@pytest.mark.parametrize(
    ("name", "value", "small"),
    [
        ("hidden_size", 4096, 48),
        ("num_attention_heads", 32, 4),
        ("num_key_value_heads", 8, 2),
        ("num_key_value_heads", 1, 1),
        ("pos_emb_width", 64, 4),
        ("intermediate_size", 11008, 80),
        ("head_dim", 128, 12),
        ("num_hidden_layers", 32, 2),
        ("vocab_size", 128256, 97),
        ("num_heads", [3, 6, 12], [2, 4, 8]),
        ("depths", [2, 2, 18, 2], [2, 2, 2, 2]),
        ("conv_kernel", [10, 3, 3], [10, 3, 3]),
        ("linear_conv_kernel_dim", 4, 4),
        ("conv1d_width", 4, 4),
        ("layer_norm_eps", 1e-5, 1e-5),
        ("mlp_ratio", 4.0, 4.0),
        ("use_cache", True, True),
    ],
)
def test_a_size_is_told_from_its_name(name: str, value: Any, small: Any) -> None:
    assert tiny(name, value, Sizes()) == small


def test_lists_for_layers_keep_one_of_every_kind() -> None:
    config = tiny_config("gemma3_text", Sizes())
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    # Those that are numbered in a list are of one kind, and the others of another.
    tower = tiny_config("qwen2_5_vl", Sizes()).vision_config
    assert (tower.depth, tower.fullatt_block_indexes) == (3, [2])
    assert len(tiny_config("qwen3_next", Sizes()).layer_types) == tiny_config("qwen3_next", Sizes()).num_hidden_layers


def test_a_folder_has_the_cache_that_its_class_has_by_default() -> None:
    assert tiny_config("llama", Sizes()).use_cache is True


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
        read = read_by(model, batch, learned(model, batch))
        assert read.share >= 0.98, read.silent


def test_the_share_that_is_read_does_not_count_what_is_not() -> None:
    with foreign("run it", "look"):
        model = classes.build(classes.class_for("clip", "IMAGE_CLASSIFICATION"), "clip", Sizes())
        randomise(model, 0)
        batch = find_inputs(model)[0]
        read = read_by(model, batch, learned(model, batch))
    norm = model.vision_model.post_layernorm
    assert read.silent == ("vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias")
    assert read.share == 1 - sum(p.numel() for p in norm.parameters()) / sum(p.numel() for p in model.parameters())


# Every field that is the reach of attention, and a model type whose code has one.
WINDOWS = {
    "gemma2": "sliding_window",
    "gemma3_text": "sliding_window",
    "mistral": "sliding_window",
    "gpt_oss": "sliding_window",
    "cohere2": "sliding_window",
    "llama4_text": "attention_chunk_size",
    "modernbert": "local_attention",
    "longformer": "attention_window",
    "gpt_neo": "window_size",
    "doge": "keep_window_size",
    "longt5": "local_radius",
}


@pytest.mark.parametrize(("model_type", "field"), WINDOWS.items())
def test_texts_are_longer_than_every_window(model_type: str, field: str) -> None:
    model_class = classes.class_for(model_type, classes.tasks(model_type)[0])
    with foreign("run it", "look"):
        model = classes.build(model_class, model_type, Sizes())
        randomise(model, 0)
        batch = find_inputs(model)[0]
        window = getattr(model.config, field)
        assert (max(window) if isinstance(window, list) else window) < LENGTH
        # With a window as wide as the text the same weights compute something else: the tiny one was felt.
        config = copy.deepcopy(model.config)
        setattr(config, field, [2 * LENGTH] * len(window) if isinstance(window, list) else 2 * LENGTH)
        with Float64():
            wide = model_class(config).double().eval()
        wide.load_state_dict(model.state_dict())
        assert judged(model, wide, batch, frozenset(outputs(model, batch))).kind == WRONG


def test_a_model_that_writes_on_does_not_see_what_follows() -> None:
    model = classes.build(classes.class_for("bert", "CAUSAL_LM"), "bert", Sizes())
    with foreign("run it", "look"):
        batch = find_inputs(model)[0]
        other = {**batch, "input_ids": batch["input_ids"].clone()}
        other["input_ids"][:, -1] += 1
        first, second = (outputs(model, given)["logits"][:, :-1] for given in (batch, other))
    assert torch.equal(first, second)


class Chooser(torch.nn.Module):
    """Its `choice` has no gradient and decides; its `dead` parameter does nothing; its `table` is not trained."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 3 * width + 1).view(3, width).double())
        self.choice = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3]).double())
        self.dead = torch.nn.Parameter(torch.ones(2).double())
        self.table = torch.nn.Parameter(torch.ones(50).double(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.weight.t()[:, self.choice.argmax()] * x
        return {"answer": hidden.sum(), "hidden": hidden, "echo": x}


def test_what_only_decides_a_choice_is_read_and_what_does_nothing_is_not() -> None:
    model, batch = Chooser(), {"x": torch.ones(1).double()}
    assert learned(model, batch) == {"answer", "hidden"}
    read = read_by(model, batch, frozenset({"answer"}))
    assert read.silent == ("dead",) and read.share == 15 / 17


def test_of_wider_hidden_states_the_first_entries_are_compared_where_there_is_no_answer() -> None:
    small, large, batch = Chooser(), Chooser(8), {"x": torch.ones(1).double()}
    given = outputs(small, batch), outputs(large, batch)
    answer, hidden = measuring.same_size(*given) & learned(small, batch), measuring.larger(*given)
    assert answer == {"answer"} and hidden == {"hidden"} and not measuring.larger(*given[::-1])
    with torch.no_grad():
        large.weight.zero_()[:, :4] = small.weight  # the hidden state begins as that of the smaller one
        assert {judged(small, large, batch, names).kind for names in (answer, hidden)} == {EXACT}
        large.weight[:, :4], large.weight[:, 4:] = 0, small.weight  # and here it does not, but the answer is the same
        assert (judged(small, large, batch, answer).kind, judged(small, large, batch, hidden).kind) == (EXACT, WRONG)
        large.weight[2, 7] += 1e-6
    wrong = judged(small, large, batch, answer)
    assert wrong.kind == WRONG and "outputs differ by" in wrong.why
    # Announced as what the eps of norms changes, the same difference is no mistake; but it is not exact.
    assert judged(small, large, batch, answer, loss=1e-6).kind == UP_TO_EPS


def grows(source: Path, output: Path, options: Sequence[str]) -> Grown:
    """Grow in this process, as the survey does in a fork; forks of a process with many threads may hang."""
    try:
        lemonx.expand(source, output, **{options[0].removeprefix("--"): options[1]})
    except LemonxError as error:
        return Grown(error.exit_code, str(error))
    return Grown(0)


def copies(source: Path, output: Path, options: Sequence[str]) -> Grown:
    """Claim to have grown the folder, and write it with another head."""
    shutil.copytree(source, output)
    tensors = load_file(output / "model.safetensors")
    save_file({name: 1.5 * x for name, x in tensors.items()}, output / "model.safetensors", {"format": "pt"})
    return Grown(0)


def refuses(source: Path, output: Path, options: Sequence[str]) -> Grown:
    return measuring.told(4, {"error": {"found": "it is not to be", "remedy": "let it be"}})


def breaks(source: Path, output: Path, options: Sequence[str]) -> Grown:
    return measuring.told(70, {"error": {"found": "a mistake"}})


def fails_to_verify(source: Path, output: Path, options: Sequence[str]) -> Grown:
    return measuring.told(1, {"error": {"found": "outputs differ"}})


@pytest.mark.parametrize(
    ("grow", "kind", "why"),
    [
        (grows, EXACT, ""),
        (copies, WRONG, "outputs differ by"),
        (refuses, REFUSED, "it is not to be: let it be"),
        (breaks, FAILED, "a mistake"),
        (fails_to_verify, NOT_VERIFIED, "outputs differ"),
    ],
)
def test_a_row_says_the_result_of_each_growth(grow: Any, kind: str, why: str) -> None:
    with foreign("survey it", "look"):
        row = measure("gpt2", "CAUSAL_LM", grow)
    assert row.built and row.ran and row.share == 1.0 and row.model_class == "GPT2LMHeadModel"
    assert {column: cell.kind for column, cell in row.cells.items()} == dict.fromkeys(COLUMNS, kind)
    assert all(why in cell.why for cell in row.cells.values())


def test_larger_hidden_states_are_compared_where_they_begin_alike() -> None:
    with foreign("survey it", "look"):
        cells = measure("clip_vision_model", "BARE", grows).cells
    kinds = {column: cell.kind for column, cell in cells.items()}
    # A width between multiples changes the basis of the hidden states.
    assert kinds == {"width 2x": EXACT, "width 1.5x": NOT_COMPARED, "depth +1": EXACT}


def test_what_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("no such layer")

    monkeypatch.setattr(measuring.classes, "build", fail)
    with foreign("survey it", "look"):
        row = measure("gpt2", "CAUSAL_LM", grows)
    assert not row.built and not row.ran and row.why == "cannot be built: no such layer"


@pytest.mark.parametrize(
    ("x", "y", "found"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.5], 0.25),
        ([1.0, float("-inf")], [1.0, float("-inf")], 0.0),  # masked logits
        ([1.0, float("-inf")], [1.0, 0.0], float("inf")),
        ([1.0, float("-inf")], [1.0, float("inf")], float("inf")),
        ([1.0, 2.0], [1.0, float("nan")], float("inf")),
    ],
)
def test_differences(x: list[float], y: list[float], found: float) -> None:
    assert relative_difference(torch.tensor(x), torch.tensor(y)) == found


def waits(source: Path, output: Path, options: Sequence[str]) -> Grown:
    time.sleep(600)
    return Grown(0)


def dies(source: Path, output: Path, options: Sequence[str]) -> Grown:
    print("this is not seen", flush=True)
    os._exit(3)


def test_each_type_has_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    job = ("gpt2", "CAUSAL_LM")
    (good,) = pool.survey([job], (__name__, "copies"))
    assert good.cells["depth +1"].kind == WRONG
    (gone,) = pool.survey([job], (__name__, "dies"))
    assert gone.why == "the process ended by itself (3)"
    (late,) = pool.survey([job], (__name__, "waits"), seconds=3)
    assert late.why == "stopped after 3 seconds"
    assert "this is not seen" not in capfd.readouterr().out


def test_a_survey_runs_the_command_that_a_user_types(tmp_path: Path) -> None:
    """A fork runs `lemonx expand`, which certifies one growth of this BERT and refuses another."""
    found = surveying.survey(["bert"], tmp_path / "r.json", 1, lambda *_: None)
    assert {row.cells["width 2x"].kind for row in found.rows} == {EXACT}
    (why,) = {row.cells["width 1.5x"].why for row in found.rows}
    assert {row.cells["width 1.5x"].kind for row in found.rows} == {REFUSED} and why.endswith("try --width 96")


def row(model_type: str, **more: Cell) -> Row:
    cells = {column: Cell(EXACT, 1e-15) for column in COLUMNS}
    return Row(model_type, "CAUSAL_LM", built=True, share=1.0, inputs=("input_ids",), cells={**cells, **more})


def test_counts_are_of_types_whose_outputs_read_enough() -> None:
    half = replace(row("b"), share=0.5)
    gone = Row("c", "MASKED_LM", why="does not run: 12 is not 13")
    also = replace(row("a"), task="MASKED_LM", cells={})
    found = counting.count([row("a"), half, gone, also])
    assert (found.surveyed, found.built, found.ran, found.read) == (3, 2, 2, 1)
    assert found.exact == dict.fromkeys(COLUMNS, 1) and found.to_eps == dict.fromkeys(COLUMNS, 0)
    # As close as eps lets an added block be is counted apart.
    close, wrong = {"depth +1": Cell(UP_TO_EPS, 1e-6)}, {"width 2x": Cell(WRONG, 0.1)}
    found = counting.count([row("e", **close), row("f", **wrong)])
    assert found.exact == {"width 2x": 1, "width 1.5x": 2, "depth +1": 1} and found.to_eps["depth +1"] == 1


def test_reasons_are_ranked_without_the_names_of_one_model() -> None:
    said = [f"model.layers.{i}.mlp, topk: {i} may go another way: keep it" for i in range(3)]
    rows = [row(f"m{i}", **{"depth +1": Cell(REFUSED, why=said[i])}) for i in range(3)]
    assert counting.reasons(rows) == {"topk: N may go another way": 3}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [row("a"), Row("b", "CTC", why="no")]
    Record("5.0", rows).write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == Record("5.0", rows)
    assert Record.read(tmp_path / "none.json").rows == []
    for broken in ("[1]", '{"transformers": "5", "rows": [{"cells": {}, "age": 3}]}'):
        (tmp_path / "record.json").write_text(broken)
        with pytest.raises(BadData, match="is not a record of a survey"):
            Record.read(tmp_path / "record.json")


def test_whoever_stops_a_survey_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(jobs: list[tuple[str, str]], *args: Any, **more: Any) -> Iterator[Row]:
        yield Row(*jobs[0], why="measured")
        raise KeyboardInterrupt

    kept = tmp_path / "r.json"
    monkeypatch.setattr(pool, "survey", stopped)
    with pytest.raises(KeyboardInterrupt):
        surveying.survey(["bert"], kept, 1, lambda *_: None)
    assert [found.task for found in Record.read(kept).rows] == ["CAUSAL_LM"]
    with pytest.raises(KeyboardInterrupt):  # and goes on with the next
        surveying.survey(["bert"], kept, 1, lambda *_: None)
    assert [found.task for found in Record.read(kept).rows] == ["CAUSAL_LM", "MASKED_LM"]


@pytest.mark.parametrize("option", ["--record", "--from"])
def test_what_is_recorded_is_printed_and_not_measured_again(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = {column: Cell(REFUSED, why="it cannot") for column in COLUMNS}
    Record("5.0", [row("gpt2", **refused)]).write(tmp_path / "r.json")
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["lemonx", "survey", "--type", "gpt2", option, str(tmp_path / "r.json")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr().out
    assert not ended.value.code and max(map(len, printed.splitlines())) <= 80
    assert "causal lm: 1 model types, of which 1 run" in printed
    assert re.search(r"gpt2 +refused +refused +refused +100 %", printed)
    assert "of 1 types exact: width 2x 0, width 1.5x 0, depth +1 0" in printed


def test_a_record_that_is_not_there_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="is not there"):
        surveying.recorded(None, tmp_path / "none.json")


def test_a_page_has_counts_then_reasons_then_folded_tables(making: Callable[[str], ModuleType]) -> None:
    survey_markdown = making("survey").survey_markdown
    refused = {column: Cell(REFUSED, why="it | cannot\n<b>") for column in COLUMNS}
    rows = [row("gpt2", **refused), replace(row("llava"), task="IMAGE_TEXT_TO_TEXT"), Row("b", "CTC", why="no")]
    page = survey_markdown(rows, "5.22.2", len(rows))
    assert "So far" not in page and "So far 3 of 9 pairs" in survey_markdown(rows, "5.22.2", 9)
    parts = ["transformers 5.22.2", "| all types, each once | 3 | 2 | 2 | 1 | 1 | 1 |",
             "| 1 | 1 | it \\| cannot &lt;b> |", "<details><summary>causal lm: 1 of 1 run</summary>",
             "| `gpt2` | refused (1) | refused (1) | refused (1) | 100 % |",
             "| `llava` | exact | exact | exact | 100 % |", "- `b` (ctc): no"]  # fmt: skip
    places = [page.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), list(zip(parts, places, strict=True))
