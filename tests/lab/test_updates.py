"""A run makes the updates that a plain loop makes, on every task that a comparison uses; teachers, ramps and Muon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemonx.errors import BadRecipe
from lemonx_lab.data import Prepared, prepare
from lemonx_lab.training.model import fresh
from lemonx_lab.training.recipe import Recipe, parse_recipe
from lemonx_lab.training.run import run
from lemonx_lab.training.stream import training_examples

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


def by_hand(asked: Recipe) -> list[float]:
    """The validation losses at the intervals of a recipe, by a loop of torch alone."""
    data = prepare(asked.task, asked.data, config=asked.config, seed=asked.seed)
    beside = {
        name: prepare(asked.task, section, config=asked.config, seed=asked.seed)
        for name, section in asked.beside.items()
    }
    assert asked.config is not None and asked.eval_every is not None
    model: Any = fresh(asked.task, asked.config, data.model, asked.seed)
    schedule = asked.schedule(len(data.train))
    examples = training_examples(asked, data, beside, schedule.total)
    norms = {id(p) for m in model.modules() if isinstance(m, torch.nn.LayerNorm) for p in m.parameters()}
    plain = [p for n, p in model.named_parameters() if id(p) in norms or "norm" in n or n.endswith("bias")]
    decayed = [p for p in model.parameters() if all(p is not other for other in plain)]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    options = dict(betas=asked.optimizer.betas, eps=asked.optimizer.eps, weight_decay=asked.optimizer.weight_decay)
    optimizer = torch.optim.AdamW(groups, **options)
    losses = [validation_loss(model, data)]
    for step in range(schedule.total):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        batch = [examples[i] for i in range(step * asked.batch_size, (step + 1) * asked.batch_size)]
        model.train()(**data.collate(batch)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), asked.clip)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % asked.eval_every == 0:
            losses.append(validation_loss(model, data))
    return losses


@torch.no_grad()
def validation_loss(model: Any, data: Prepared) -> float:
    """The mean over all examples, in batches of 7, each by its number of examples."""
    examples = [data.validation[i] for i in range(len(data.validation))]
    batches = [examples[i : i + 7] for i in range(0, len(examples), 7)]
    return sum(float(model.eval()(**data.collate(b)).loss) * len(b) for b in batches) / len(examples)


# For one of the tasks, a part of every batch is of another section.
SHAKESPEARE = dict(
    kind="text", path=str(Path(__file__).parents[1] / "data/text/shakespeare.txt"), length=32, validation_examples=16
)
REHEARSAL = {"masked-lm": dict(beside={"old": SHAKESPEARE}, rehearse={"old": 0.25})}


@pytest.mark.parametrize("task", TASKS)
def test_the_updates_are_those_of_a_plain_loop(task: str, tmp_path: Path) -> None:
    asked = recipe(task, **REHEARSAL.get(task, {}))
    done = run(asked, tmp_path / "out")
    assert [row["validation_loss"] for row in done.curve] == pytest.approx(by_hand(asked), rel=1e-5)
    assert abs(done.final["validation_loss"] - done.curve[0]["validation_loss"]) > 1e-3  # it trained


@pytest.mark.parametrize(
    ("task", "kind"),
    [("causal-lm", "hard"), ("masked-lm", "soft"), ("causal-lm", "early"), ("image-classification", "early")],
)
def test_with_a_teacher(task: str, kind: str, tmp_path: Path) -> None:
    """The FLOPs end with the teacher's part of the run: a teacher that is not asked costs nothing."""
    teacher = run(recipe(task, steps=20), tmp_path / "teacher")
    larger = {**TASKS[task]["config"], "hidden_size": 48, "num_hidden_layers": 2}
    asked = dict(config=larger, inheritance=dict(kind=kind, until=0.4, teacher=str(teacher.output)))
    done = run(recipe(task, **asked), tmp_path / "taught")
    alone = run(recipe(task, config=larger), tmp_path / "alone")
    assert alone.final["validation_loss"] != done.final["validation_loss"]
    flops = {row["step"]: row["flops"] for row in done.curve}
    assert flops[20] - flops[10] > flops[40] - flops[30] == alone.flops / STEPS * 10


def test_with_a_growth_and_a_ramp(tmp_path: Path) -> None:
    source = run(recipe("causal-lm", steps=20), tmp_path / "source")
    grown = dict(config=None, source=str(source.output), expand=dict(width=64, depth=3, free="own", verify=False))
    done = run(recipe("causal-lm", ramp=15, warmup=0, **grown), tmp_path / "grown")
    assert done.curve[0]["validation_loss"] == pytest.approx(source.final["validation_loss"], rel=1e-5)


def test_a_recipe_from_when_there_were_two_loops(tmp_path: Path) -> None:
    """It runs as it did, and says that the key has no effect."""
    done = run(recipe("causal-lm", steps=2, warmup=0, loop="lean"), tmp_path / "out")
    assert [note for note in done.notes if "the key loop has no effect" in note]
    assert recipe("causal-lm", loop="lean").as_dict() == recipe("causal-lm").as_dict()


MUON = dict(kind="muon", weight_decay=0.01, momentum=0.9)


def test_muon_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Stopped at step 15, with a checkpoint at step 10: both optimizers go on bit for bit."""
    asked = recipe("causal-lm", steps=20, save_every=10, optimizer=MUON)

    def stop(step: int, *_: Any) -> None:
        if step == 15:
            raise KeyboardInterrupt

    whole = run(asked, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "stopped", progress=stop)
    resumed = run(asked, tmp_path / "stopped")
    weights = [load_file(one.output / "model.safetensors") for one in (whole, resumed)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(lora={}), "lora adapts a source"),
        (dict(lora={}, config=None, source="x", save_every=5), "leave out train: new, stages and save_every"),
        (dict(optimizer=MUON, steps=None, stages=[dict(steps=2), dict(steps=2, expand=dict(width=64))]), "do not grow"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRecipe, match=says):
        recipe("causal-lm", **changes)


def test_muon_moves_hidden_matrices_by_orthogonal_steps(tmp_path: Path) -> None:
    """AdamW has all else; one step of a hidden matrix has singular values near each other, one of a table has not."""
    common = dict(steps=1, warmup=0, min_learning_rate=0.0, decay="constant", clip=0.0)
    start = run(recipe("causal-lm", **{**common, "learning_rate": 1e-12}), tmp_path / "start")
    muon = dict(kind="muon", weight_decay=0.0)
    done = run(recipe("causal-lm", **common, optimizer=muon), tmp_path / "muon")
    before, after = (load_file(each.output / "model.safetensors") for each in (start, done))

    def spread(name: str) -> float:
        values = torch.linalg.svdvals((after[name] - before[name]).double())
        return float(values[0] / values[values > 0.05 * values[0]][-1])

    assert spread("model.layers.0.mlp.up_proj.weight") < 3 < spread("model.embed_tokens.weight")
