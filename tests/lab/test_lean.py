"""The lean loop makes the updates that Trainer makes: the same curve, on every task that a comparison uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemonx.errors import BadRecipe
from lemonx_lab.training.recipe import Recipe, parse_recipe
from lemonx_lab.training.run import FinishedRun, run

STEPS = 50
COMMON: dict[str, Any] = dict(
    steps=STEPS, batch_size=4, eval_batch_size=7, learning_rate=5e-3, min_learning_rate=5e-4, warmup=5, eval_every=10,
    save_every=0, clip=0.5, optimizer=dict(betas=(0.9, 0.98), weight_decay=0.05), seed=3,
)  # fmt: skip
LLAMA = dict(
    model_type="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=32,
)  # fmt: skip
VIT = dict(
    model_type="vit", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, patch_size=4,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
BERT = dict(
    model_type="pre-ln-bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
TEXT = dict(kind="stdlib", length=32, validation_examples=16)
# Words; images with accuracy beside the loss, and an uneven last batch; masked words with draws of their own.
TASKS: dict[str, dict[str, Any]] = {
    "causal-lm": dict(config=LLAMA, data=TEXT),
    "image-classification": dict(config=VIT, data=dict(kind="digits", validation_examples=30)),
    "masked-lm": dict(config=BERT, data=TEXT, decay="wsd", min_learning_rate=0.0),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(task: str, **changes: Any) -> Recipe:
    return parse_recipe({**COMMON, "task": task, **TASKS[task], **changes})


def assert_same_curve(one: FinishedRun, other: FinishedRun) -> None:
    """Row by row: steps, rates and FLOPs equal, losses to 1e-6."""
    assert [row["step"] for row in one.curve] == [row["step"] for row in other.curve]
    for a, b in zip(one.curve, other.curve, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds"}:
            assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-6), (name, a["step"])


# For one of the tasks, a part of every batch is of another section.
SHAKESPEARE = dict(
    kind="text", path=str(Path(__file__).parents[1] / "data/text/shakespeare.txt"), length=32, validation_examples=16
)
REHEARSAL = {"masked-lm": dict(beside={"old": SHAKESPEARE}, rehearse={"old": 0.25})}


@pytest.mark.parametrize("task", TASKS)
def test_the_curve_is_trainer_s(task: str, tmp_path: Path) -> None:
    asked = REHEARSAL.get(task, {})
    slow = run(recipe(task, **asked), tmp_path / "trainer")
    lean = run(recipe(task, loop="lean", **asked), tmp_path / "lean")
    assert_same_curve(slow, lean)
    assert abs(lean.final["validation_loss"] - lean.curve[0]["validation_loss"]) > 1e-3  # it trained
    assert lean.flops == slow.flops
    assert {path.name for path in lean.output.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "curve.csv",
        "run.json",
    }


@pytest.mark.parametrize(
    ("task", "kind"),
    [("causal-lm", "hard"), ("masked-lm", "soft"), ("causal-lm", "early"), ("image-classification", "early")],
)
def test_with_a_teacher(task: str, kind: str, tmp_path: Path) -> None:
    """The FLOPs end with the teacher's part of the run: a teacher that is not asked costs nothing."""
    teacher = run(recipe(task, loop="lean", steps=20), tmp_path / "teacher")
    larger = {**TASKS[task]["config"], "hidden_size": 48, "num_hidden_layers": 2}
    asked = dict(config=larger, inheritance=dict(kind=kind, until=0.4, teacher=str(teacher.output)))
    done = [run(recipe(task, loop=loop, **asked), tmp_path / loop) for loop in ("trainer", "lean")]
    assert_same_curve(*done)
    alone = run(recipe(task, loop="lean", config=larger), tmp_path / "alone")
    assert alone.final["validation_loss"] != done[1].final["validation_loss"]
    flops = {row["step"]: row["flops"] for row in done[1].curve}
    assert flops[20] - flops[10] > flops[40] - flops[30] == alone.flops / STEPS * 10


def test_with_a_growth_and_a_ramp(tmp_path: Path) -> None:
    source = run(recipe("causal-lm", loop="lean", steps=20), tmp_path / "source")
    grown = dict(config=None, source=str(source.output), expand=dict(width=64, depth=3, free="own", verify=False))
    asked = {"ramp": 15, "warmup": 0, **grown}
    done = [run(recipe("causal-lm", loop=loop, **asked), tmp_path / loop) for loop in ("trainer", "lean")]
    assert_same_curve(*done)
    assert done[1].curve[0]["validation_loss"] == pytest.approx(source.final["validation_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"save_every": 5}, {"gradient_accumulation": 2}, {"precision": "bfloat16"}, {"report_to": ["tensorboard"]}],
)
def test_what_it_has_not(change: dict[str, Any]) -> None:
    with pytest.raises(BadRecipe, match="the lean loop has no stages"):
        recipe("causal-lm", loop="lean", **change)


def test_a_loss_that_is_not_finite_ends_it(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="the loss is not finite at step"):
        run(recipe("causal-lm", loop="lean", learning_rate=1e30, clip=0, min_learning_rate=0), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_muon_moves_hidden_matrices_by_orthogonal_steps(tmp_path: Path) -> None:
    """AdamW has all else; one step of a hidden matrix has singular values near each other, one of a table has not."""
    common = dict(loop="lean", steps=1, warmup=0, min_learning_rate=0.0, decay="constant", clip=0.0)
    start = run(recipe("causal-lm", **{**common, "learning_rate": 1e-12}), tmp_path / "start")
    muon = dict(kind="muon", weight_decay=0.0)
    done = run(recipe("causal-lm", **common, optimizer=muon), tmp_path / "muon")
    before, after = (load_file(each.output / "model.safetensors") for each in (start, done))

    def spread(name: str) -> float:
        values = torch.linalg.svdvals((after[name] - before[name]).double())
        return float(values[0] / values[values > 0.05 * values[0]][-1])

    assert spread("model.layers.0.mlp.up_proj.weight") < 3 < spread("model.embed_tokens.weight")
    with pytest.raises(BadRecipe, match="muon is in the lean loop alone"):
        recipe("causal-lm", optimizer=muon)
