"""The survey of all model types: tiny models are what they should be, and no growth is called what it is not."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lemonx.cli import main, surveying
from lemonx.cli.render.survey import survey_markdown
from lemonx.cli.surveying import by_run, by_table
from lemonx.diagnostics.survey import classes, counting, measuring, pool, record
from lemonx.diagnostics.survey.configs import tiny_config
from lemonx.diagnostics.survey.fields import tiny
from lemonx.diagnostics.survey.measuring import Claim, difference, judged, measure
from lemonx.diagnostics.survey.randomise import randomise
from lemonx.diagnostics.survey.rows import (
    COLUMNS,
    EXACT,
    FAILED,
    NONE,
    NOT_COMPARED,
    REFUSED,
    SMALL_GAINS,
    TOWERS,
    UP_TO_EPS,
    WRONG,
    Cell,
    Row,
)
from lemonx.diagnostics.survey.running import giving, learned, read_by
from lemonx.diagnostics.survey.sizes import BASES, Sizes
from lemonx.errors import BadData, Refused
from lemonx.models.foreign import foreign
from lemonx.verification.finding import find_inputs, outputs
from lemonx.verification.float64 import Float64
from lemonx.verification.media import LENGTH, Batch

WIDER, DEEPER = COLUMNS["width x2"](Sizes()), COLUMNS["depth"](Sizes())


@pytest.mark.parametrize(
    ("name", "value", "small", "wide"),
    [
        ("hidden_size", 4096, 48, 96),
        ("num_attention_heads", 32, 4, 8),
        ("num_key_value_heads", 8, 2, 4),
        ("num_key_value_heads", 1, 1, 1),
        ("pos_emb_width", 64, 4, 4),
        ("intermediate_size", 11008, 80, 160),
        ("head_dim", 128, 12, 12),
        ("num_hidden_layers", 32, 2, 2),
        ("vocab_size", 128256, 97, 97),
        ("num_heads", [3, 6, 12], [2, 4, 8], [4, 8, 16]),
        ("depths", [2, 2, 18, 2], [2, 2, 2, 2], [2, 2, 2, 2]),
        ("conv_kernel", [10, 3, 3], [10, 3, 3], [10, 3, 3]),
        ("linear_conv_kernel_dim", 4, 4, 4),
        ("conv1d_width", 4, 4, 4),
        ("layer_norm_eps", 1e-5, 1e-5, 1e-5),
        ("mlp_ratio", 4.0, 4.0, 4.0),
        ("use_cache", True, True, True),
    ],
)
def test_a_size_is_told_from_its_name(name: str, value: Any, small: Any, wide: Any) -> None:
    assert tiny(name, value, Sizes()) == small
    assert tiny(name, value, WIDER) == wide


def test_an_inner_size_in_terms_of_the_width_grows_alone_in_its_column() -> None:
    ffn = COLUMNS["ffn"](Sizes())
    assert tiny("mlp_ratio", 4, ffn) == 8 and tiny("mlp_ratios", [4.0, 2.0], ffn) == [8.0, 4.0]
    small, large = (tiny_config("swin", sizes) for sizes in (Sizes(), ffn))
    assert (small.embed_dim, large.embed_dim) == (small.embed_dim,) * 2 and large.mlp_ratio == 2 * small.mlp_ratio


def test_lists_for_layers_keep_one_of_every_kind() -> None:
    config, deeper = (tiny_config("gemma3_text", sizes) for sizes in (Sizes(), DEEPER))
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert deeper.layer_types == config.layer_types + config.layer_types[1:]
    # Those that are numbered in a list are of one kind, and the others of another.
    towers = [tiny_config("qwen2_5_vl", sizes).vision_config for sizes in (Sizes(), DEEPER)]
    assert [(tower.depth, tower.fullatt_block_indexes) for tower in towers] == [(3, [2]), (5, [2, 4])]


def test_a_deeper_model_has_the_same_classes() -> None:
    assert tiny_config("vit", Sizes()).num_labels == tiny_config("vit", DEEPER).num_labels == 2
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
        read = read_by(model, batch, learned(model, batch))
        assert read.share >= 0.98, read.silent
        for column in ("width x2", "width x1.5", "depth"):
            large = classes.build(model_class, model_type, COLUMNS[column](base))
            grown = {name: p.numel() for name, p in large.named_parameters()}
            assert sum(grown.values()) > sum(p.numel() for p in model.parameters())
            outputs(large, batch)


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


TOWERED = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "smolvlm", "internvl")


@pytest.mark.parametrize("model_type", TOWERED)
def test_all_towers_grow_together_or_one_at_a_time(model_type: str) -> None:
    """In every column the parameters of the towers that should grow do, and those of the others do not."""
    model_class = classes.class_for(model_type, "IMAGE_TEXT_TO_TEXT")
    columns = {"width x2": {"vision", "text"}, "depth": {"vision", "text"}, "ffn": {"vision", "text"},
               "vision alone": {"vision"}, "text alone": {"text"}}  # fmt: skip
    with foreign("build it", "look"):
        small = classes.build(model_class, model_type, Sizes())
        batch = find_inputs(small)[0]
        sizes = {name: p.shape for name, p in small.named_parameters()}
        for column, wanted in columns.items():
            large = classes.build(model_class, model_type, {**COLUMNS, **TOWERS}[column](Sizes()))
            changed = {name for name, p in large.named_parameters() if sizes.get(name) != p.shape}
            blocks = [name for name in changed if re.search(r"\.\d+\.", name) and not re.search("project|merger", name)]
            assert {"vision" if re.search("vision|visual", name) else "text" for name in blocks} == wanted, column
            outputs(large, batch)
        # Heads make up the width of these towers for pictures: more of them would be smaller ones.
        large = classes.build(model_class, model_type, COLUMNS["heads"](Sizes()))
        assert all(sizes[n] == p.shape for n, p in large.named_parameters() if re.search("vision|visual", n))
        outputs(large, batch)


def test_a_column_grows_more_heads_where_the_code_lets_it() -> None:
    """Apertus' config has no head_dim, but its code reads one: more heads are a larger layer."""
    for model_type, grows in (("apertus", True), ("gpt2", False)):
        model_class = classes.class_for(model_type, "CAUSAL_LM")
        small, large = (classes.build(model_class, model_type, s) for s in (Sizes(), COLUMNS["heads"](Sizes())))
        assert (large.num_parameters() > small.num_parameters()) is grows


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


def test_a_growth_gives_the_answers_alone() -> None:
    small, large = Chooser(), Chooser(8)
    with giving(frozenset({"answer"}), small, large):
        assert type(small) is type(large) and small(x=torch.ones(1)).keys() == {"answer"}
    assert type(small) is Chooser and small(torch.ones(1)).keys() == {"answer", "hidden", "echo"}


def test_a_growth_of_which_every_output_grows_is_judged_by_what_it_says_of_them() -> None:
    with foreign("survey it", "look"):
        row = measure("clip_vision_model", "BARE", {"silent": leaves_alone, "false": says_more, "inferred": by_run})
    widths = {way: cells["width x2"].kind for way, cells in row.cells.items()}
    assert widths == {"silent": NOT_COMPARED, "false": WRONG, "inferred": EXACT}
    assert row.cells["silent"]["depth"].kind == WRONG  # hidden states of the same size are compared


def says_more(small: Any, large: Any, inputs: Batch, answers: frozenset[str]) -> Claim:
    """Claims that larger outputs begin with what they were, and did nothing."""
    return Claim(begins=True)


def leaves_alone(small: Any, large: Any, inputs: Batch, answers: frozenset[str]) -> Claim:
    """Claims to have filled the larger model, and did not."""
    return Claim()


def refuses(small: Any, large: Any, inputs: Batch, answers: frozenset[str]) -> Claim:
    raise Refused("it is not to be")


def breaks(small: Any, large: Any, inputs: Batch, answers: frozenset[str]) -> Claim:
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
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.5], 0.25),
        ([1.0, float("-inf")], [1.0, float("-inf")], 0.0),  # masked logits
        ([1.0, float("-inf")], [1.0, 0.0], float("inf")),
        ([1.0, float("-inf")], [1.0, float("inf")], float("inf")),
        ([1.0, 2.0], [1.0, float("nan")], float("inf")),
    ],
)
def test_differences(x: list[float], y: list[float], found: float) -> None:
    assert difference(torch.tensor(x), torch.tensor(y)) == found


def waits(small: Any, large: Any, inputs: Batch, answers: frozenset[str]) -> Claim:
    import time

    time.sleep(600)
    return Claim()


def dies(small: Any, large: Any, inputs: Batch, answers: frozenset[str]) -> Claim:
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
    assert counting.best(row("a", inferred=refused))["depth"].kind == EXACT
    # A growth that is wrong is worth more notice than one that was refused.
    wrong = {column: Cell(WRONG, 0.1, "differs") for column in COLUMNS}
    assert counting.best(replace(row("a"), cells={"table": refused, "inferred": wrong}))["ffn"].kind == WRONG


def test_counts_are_of_types_whose_outputs_read_enough() -> None:
    half = replace(row("b"), share=0.5)
    gone = Row("c", "MASKED_LM", why="does not run: 12 is not 13")
    also = replace(row("a"), task="MASKED_LM", cells={})
    found = counting.count([row("a"), half, gone, also])
    assert (found.surveyed, found.built, found.ran, found.read) == (3, 2, 2, 1)
    assert found.both == 1 and found.indivisible == 1 and found.exact["heads"] == 1
    # As close as eps lets an added block be is counted apart.
    close = {"table": {**row("e").cells["table"], "depth": Cell(UP_TO_EPS, 1e-6)}}
    found = counting.count([replace(row("e"), cells=close)])
    assert (found.both, found.with_gains, found.announced) == (0, 0, 1)
    # Exact with small gains counts, and is said.
    exact = {"table": {**row("g").cells["table"], "depth": Cell(EXACT, 1e-14, SMALL_GAINS)}}
    found = counting.count([row("a"), replace(row("g"), cells=exact)])
    assert (found.both, found.with_gains, found.announced) == (2, 1, 2)
    # Exact in width alone is not exact in both.
    wide = {"inferred": {column: Cell(EXACT if column == "width x2" else REFUSED) for column in COLUMNS}}
    assert counting.count([replace(row("d"), cells=wide)]).both == 0


def test_reasons_are_ranked_without_the_names_of_one_model() -> None:
    said = [f"model.layers.{i}.mlp, topk: {i} may go another way: keep it" for i in range(3)]
    rows = [replace(row(f"m{i}"), cells={"inferred": {"depth": Cell(REFUSED, why=said[i])}}) for i in range(3)]
    assert counting.reasons(rows) == {"topk: N may go another way": 3}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [row("a"), Row("b", "CTC", why="no")]
    record.write(tmp_path / "record.json", "5.0", rows)
    assert record.read(tmp_path / "record.json") == record.Record("5.0", rows)
    assert record.read(tmp_path / "none.json").rows == []
    for broken in ("[1]", '{"transformers": "5", "rows": [{"cells": {}, "age": 3}]}'):
        (tmp_path / "record.json").write_text(broken)
        with pytest.raises(BadData, match="is not a record of a survey"):
            record.read(tmp_path / "record.json")


def test_whoever_stops_a_survey_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(jobs: list[tuple[str, str]], *args: Any, **more: Any) -> Iterator[Row]:
        yield Row(*jobs[0], why="measured")
        raise KeyboardInterrupt

    kept = tmp_path / "r.json"
    monkeypatch.setattr(pool, "survey", stopped)
    with pytest.raises(KeyboardInterrupt):
        surveying.survey(["bert"], kept, 1, lambda *_: None)
    assert [found.task for found in record.read(kept).rows] == ["CAUSAL_LM"]
    with pytest.raises(KeyboardInterrupt):  # and goes on with the next
        surveying.survey(["bert"], kept, 1, lambda *_: None)
    assert [found.task for found in record.read(kept).rows] == ["CAUSAL_LM", "MASKED_LM"]


@pytest.mark.parametrize("option", ["--record", "--from"])
def test_what_is_recorded_is_printed_and_not_measured_again(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = {column: Cell(REFUSED, why="it cannot") for column in COLUMNS}
    record.write(tmp_path / "r.json", "5.0", [replace(row("gpt2"), cells={"inferred": refused})])
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["lemonx", "architectures", "--all", "--type", "gpt2", option, str(tmp_path / "r.json")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr().out
    assert not ended.value.code and max(map(len, printed.splitlines())) <= 80
    assert "causal lm: 1 model types, of which 1 run" in printed
    assert re.search(r"gpt2 +refused +refused +refused +refused +refused +100 %", printed)
    assert "exact at width x2 and in depth: 0 types" in printed


def test_a_record_that_is_not_there_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="is not there"):
        surveying.recorded(None, tmp_path / "none.json")


def test_a_page_has_counts_then_reasons_then_folded_tables() -> None:
    refused = {column: Cell(REFUSED, why="it | cannot\n<b>") for column in COLUMNS}
    towers = {**{column: Cell(EXACT, 0.0) for column in COLUMNS}, **{tower: Cell(EXACT, 0.0) for tower in TOWERS}}
    rows = [
        replace(row("gpt2"), cells={"inferred": refused}),
        replace(row("llava"), task="IMAGE_TEXT_TO_TEXT", cells={"inferred": towers}),
        Row("b", "CTC", why="does not run: no"),
    ]
    page = survey_markdown(rows, "5.22.2", len(rows))
    assert "So far" not in page and "So far 3 of 9 pairs" in survey_markdown(rows, "5.22.2", 9)
    parts = ["transformers 5.22.2", "| all types, each once | 3 | 2 | 2 | 1 | 0 | 1 | 1 | 1 | 1 | 1 |",
             "| 1 | 1 | it \\| cannot &lt;b> |", "<details><summary>Towers one at a time",
             "| `llava` | exact | exact | 100 % |", "<details><summary>causal lm: 1 of 1 run</summary>",
             "| `gpt2` | refused (1) | refused (1) | refused (1) | refused (1) | refused (1) | 100 % |",
             "- `b` (ctc): does not run: no"]  # fmt: skip
    places = [page.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), list(zip(parts, places, strict=True))
