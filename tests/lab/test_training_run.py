"""Whole runs of tiny models on real data: what is written, what is refused, and that nothing but the recipe matters."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemonx import api, cli
from lemonx.errors import BadCheckpoint, BadOutput, BadRecipe
from lemonx.training.recipe_file import with_changes
from lemonx.training.schedule import Schedule
from lemonx_lab import data
from lemonx_lab.training import model, run_folder
from lemonx_lab.training.inheritance import inheritance_loss
from lemonx_lab.training.recipe import Recipe, parse_recipe
from lemonx_lab.training.run import FinishedRun, run

LLAMA = dict(
    model_type="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=32,
)  # fmt: skip
# Dropout and masks: what is random must be the same again.
BERT = dict(
    model_type="pre-ln-bert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=32, hidden_dropout_prob=0.2,
)  # fmt: skip
TEXT = {"kind": "stdlib", "length": 32, "validation_examples": 12}
BASE: dict[str, Any] = dict(
    task="causal-lm", config=LLAMA, data=TEXT, steps=12, batch_size=4, learning_rate=1e-2, min_learning_rate=1e-3,
    warmup=2, eval_every=4, save_every=5, optimizer=dict(weight_decay=0.05),
)  # fmt: skip
MASKED = with_changes(BASE, {"task": "masked-lm", "config": BERT})


def recipe(**changes: Any) -> Recipe:
    return parse_recipe(with_changes(BASE, {key.replace("__", "."): value for key, value in changes.items()}))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Another number of threads could sum in another order; and a copy of a process has none of its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run(recipe(), tmp_path_factory.mktemp("trained") / "out")


def test_bfloat16_on_a_processor(tmp_path: Path) -> None:
    """Trainer refuses it unless it is told that there is no accelerator."""
    done = run(recipe(precision="bfloat16", steps=3), tmp_path / "out")
    assert done.final["validation_loss"] < 10
    [note] = done.notes
    assert note.startswith(
        f"the last checkpoint, with the optimizer's state, is kept as {tmp_path / 'out' / 'checkpoint-3'}"
    )


def assert_same(first: FinishedRun, second: FinishedRun) -> None:
    """Bit for bit, but for the time it took."""

    def timeless(done: FinishedRun) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in done.curve]

    assert timeless(first) == timeless(second)
    one, two = (load_file(done.output / "model.safetensors") for done in (first, second))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# What a run leaves.


def test_what_a_run_writes(trained: FinishedRun) -> None:
    names = {path.name for path in trained.output.iterdir()}
    assert {"config.json", "model.safetensors", "curve.csv", "curve.png", "run.json", "checkpoint-12"} <= names
    assert not any(name.startswith(".") for name in names)
    assert (trained.output / "curve.png").read_bytes().startswith(b"\x89PNG")
    account = json.loads((trained.output / "run.json").read_text())
    assert account["finished"] and account["seed"] == 0 and account["final"] == trained.final
    assert parse_recipe(account["recipe"]) == recipe()
    assert account["data"]["digest"] == data.prepare("causal-lm", TEXT, config=LLAMA, seed=0).digest
    assert {"python", "torch", "transformers", "lemonx"} <= account["versions"].keys()
    # What was trained is a checkpoint that grows.
    assert api.plan(trained.output, width=48, depth=2).exactness


def test_the_curve(trained: FinishedRun) -> None:
    assert [row["step"] for row in trained.curve] == [0, 4, 5, 8, 10, 12]
    with open(trained.output / "curve.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "learning_rate", "train_loss", "validation_loss", "flops", "seconds"]
    assert [row["validation_loss"] != "" for row in rows] == [True, True, False, True, False, True]
    schedule = Schedule(1e-2, 1e-3, 2, 12)
    for row in trained.curve[1:]:
        # A row tells the rate of the update that led to it.
        assert row["learning_rate"] == pytest.approx(schedule.learning_rate(row["step"] - 1), rel=1e-12)
    assert trained.curve[0]["validation_loss"] == pytest.approx(math.log(260), abs=0.1)  # bytes and special tokens
    assert trained.final["validation_loss"] < trained.curve[0]["validation_loss"] - 0.1
    assert [row["seconds"] for row in trained.curve] == sorted(row["seconds"] for row in trained.curve)


def step_flops(width: int, depth: int) -> int:
    """Of a step of four examples through LLAMA, or the same in other proportions, by hand."""
    kv, ffn, length, vocabulary = width // 2, 3 * width // 2, 32, 260
    block = 2 * width * width + 2 * width * kv + 3 * width * ffn + 2 * length * width  # scores and values, per token
    return 4 * 3 * 2 * length * (depth * block + width * vocabulary)


def test_flops_are_counted(trained: FinishedRun) -> None:
    assert trained.flops == 12 * step_flops(32, 1)
    assert [vars(stage) for stage in trained.stages] == [{"start": 0, "end": 12, "flops": trained.flops}]


@pytest.mark.parametrize("experts", [4, 8])
def test_flops_of_experts_are_those_of_the_ones_picked(experts: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    from lemonx_lab.training.trainer import forward_flops

    sizes: dict[str, Any] = dict(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    inputs = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    mixture = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=2))
    dense = LlamaForCausalLM(LlamaConfig(**sizes))
    router, mlp = 2 * 8 * 2 * 16 * experts, 2 * 8 * 2 * 3 * 16 * 24
    assert forward_flops(mixture, inputs) == forward_flops(dense, inputs) + mlp + router


def test_wsd_with_a_growth_inside(tmp_path: Path) -> None:
    """The rate stays as it is when the model grows: no decay before, no new warm-up after; it decays at the end."""
    stages = [dict(steps=4), dict(steps=6, expand=dict(width=64, verify=False))]
    asked = recipe(steps=None, stages=stages, decay="wsd", cooldown=0.4, min_learning_rate=0, warmup=2, eval_every=1)
    done = run(asked, tmp_path / "out")
    rates = [row["learning_rate"] for row in done.curve[1:]]
    assert rates == pytest.approx([0, 5e-3, *[1e-2] * 5, 7.5e-3, 5e-3, 2.5e-3], rel=1e-12)
    constant = recipe(steps=3, decay="constant", warmup=1, min_learning_rate=0, eval_every=1)
    rates = [row["learning_rate"] for row in run(constant, tmp_path / "constant").curve[1:]]
    assert rates == pytest.approx([0, 1e-2, 1e-2], rel=1e-12)


def test_the_validation_loss_is_that_of_the_model(trained: FinishedRun) -> None:
    """Of the saved weights, computed here: every window has as many tokens, so their mean is the mean of windows."""
    prepared = data.prepare("causal-lm", TEXT, config=LLAMA, seed=0)
    loaded = model.loaded("causal-lm", trained.output, {}).eval()
    batch = prepared.collate([prepared.validation[i] for i in range(len(prepared.validation))])
    with torch.no_grad():
        loss = float(loaded(**batch).loss)
    # Means of float32 losses in another order.
    assert trained.final["validation_loss"] == pytest.approx(loss, rel=16 * torch.finfo(torch.float32).eps)


def test_a_run_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(recipe(steps=2, warmup=0), tmp_path / "out")
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int, bool]] = []
    run(recipe(steps=3, warmup=0), tmp_path / "out", progress=lambda *what: told.append((*what[:2], bool(what[2]))))
    assert told == [(0, 3, True), (1, 3, False), (2, 3, False), (3, 3, False), (3, 3, True)]


# Nothing but the recipe matters.


def test_the_seed_decides(trained: FinishedRun, tmp_path: Path) -> None:
    assert_same(trained, run(recipe(), tmp_path / "again"))
    other = run(recipe(seed=1), tmp_path / "other")
    assert other.final["validation_loss"] != trained.final["validation_loss"]


def test_accumulated_gradients_are_those_of_the_batch(trained: FinishedRun, tmp_path: Path) -> None:
    parts = run(recipe(gradient_accumulation=2), tmp_path / "parts")
    # Sums of float32 gradients in another order, and Adam divides by their size: twelve steps of at most 1e-2.
    for whole, part in zip(trained.curve, parts.curve, strict=True):
        if "validation_loss" in whole:
            assert part["validation_loss"] == pytest.approx(whole["validation_loss"], abs=1e-4)
    assert parts.flops == trained.flops


def killed_at(last: int, asked: Recipe, output: Path) -> int:
    """How a process ends that trains and is killed at this step: a copy of this one, which need import nothing."""

    def kill(step: int, *_: Any) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    process = os.fork()
    if not process:
        try:
            run(asked, output, progress=kill)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed at step 7 of 12, two steps after a checkpoint: dropout, masks, data order and Adam go on bit for bit."""
    whole = run(parse_recipe(MASKED), tmp_path / "whole")
    assert killed_at(7, parse_recipe(MASKED), tmp_path / "killed") == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "killed").glob("checkpoint-*")] == ["checkpoint-5"]
    assert not (tmp_path / "killed" / "config.json").exists()
    first: list[int] = []
    resumed = run(parse_recipe(MASKED), tmp_path / "killed", progress=lambda step, *_: first.append(step))
    assert first[0] == 6
    assert_same(whole, resumed)


def test_a_checkpoint_appears_whole_or_not_at_all(
    trained: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while it writes its second checkpoint, a run goes on from the first."""
    save, saved = torch.save, []

    def stop(content: Any, path: Any, *more: Any, **options: Any) -> None:
        saved.append(str(path))
        if "checkpoint-10" in str(path):
            Path(path).write_bytes(b"half")
            raise KeyboardInterrupt
        save(content, path, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            run(recipe(), tmp_path / "out")
    assert any("checkpoint-10" in path for path in saved)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-5"]
    assert_same(trained, run(recipe(), tmp_path / "out"))


# Where a run may write.


def test_a_finished_run_is_not_replaced(trained: FinishedRun, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(recipe(steps=1, warmup=0), output)
    with pytest.raises(BadOutput, match="holds a finished run"):
        run(recipe(steps=1, warmup=0), output)
    # A run that cannot even begin leaves the old one.
    with pytest.raises(BadRecipe, match="is not a field of a llama"):
        run(recipe(config__hiden_size=3), output, force=True)
    assert json.loads((output / "run.json").read_text())["steps"] == 1
    assert_same(trained, run(recipe(), output, force=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(BadOutput, match="not the folder of a run"):
            run(recipe(), tmp_path, force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_unfinished_run_of_another_recipe(tmp_path: Path) -> None:
    def stop(step: int, *_: Any) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe(), tmp_path / "out", progress=stop)
    with pytest.raises(BadOutput, match="unfinished run of another recipe"):
        run(recipe(learning_rate=5e-3), tmp_path / "out")
    with pytest.raises(BadOutput, match="holds an unfinished run: resume"):
        run(recipe(), tmp_path / "out", resume=False)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (dict(config=None, source="nowhere"), BadCheckpoint, "nowhere"),
        (dict(inheritance__teacher="nowhere"), BadCheckpoint, "nowhere"),
    ],
)
def test_a_run_that_cannot_begin_leaves_nothing(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        run(recipe(**changes), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_task(trained: FinishedRun, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="masked-lm"):
        run(recipe(config=None, source=str(trained.output), task="masked-lm"), tmp_path / "out")


def test_the_source_is_not_written_to(trained: FinishedRun) -> None:
    before = sorted(trained.output.rglob("*"))
    for output in (trained.output, trained.output / "inside", trained.output.parent):
        with pytest.raises(BadOutput, match="source"):
            run(recipe(config=None, source=str(trained.output)), output, force=True)
    assert sorted(trained.output.rglob("*")) == before


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match=r"not finite at step \d+: lower learning_rate"):
        run(recipe(learning_rate=1e30, clip=0), tmp_path / "out")


def test_tracking(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = run(recipe(report_to="tensorboard", steps=4), tmp_path / "out")
    (events,) = done.output.rglob("events.out.tfevents*")
    tracked = EventAccumulator(str(events.parent)).Reload().Scalars("eval/loss")
    assert [(event.step, pytest.approx(event.value)) for event in tracked] == [
        (row["step"], row["validation_loss"]) for row in done.curve
    ]


# Growth.


def assert_lossless(before: float, after: float, fan_in: int) -> None:
    """A float32 sum of n terms is off by at most n eps, before and after."""
    assert after == pytest.approx(before, rel=2 * fan_in * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("width", [48, 64])
def test_an_expanded_model_starts_where_its_source_ended(width: int, trained: FinishedRun, tmp_path: Path) -> None:
    grown = recipe(config=None, source=str(trained.output), expand=dict(width=width, depth=3, verify=False), steps=3)
    done = run(grown, tmp_path / "out")
    assert_lossless(trained.final["validation_loss"], done.curve[0]["validation_loss"], 2 * 48)
    assert json.loads((done.output / "config.json").read_text())["hidden_size"] == width
    assert done.final["validation_loss"] < trained.final["validation_loss"]
    assert not (done.output / ".expanded").exists()


def test_stages_are_one_run(tmp_path: Path) -> None:
    """Two growths: one step counter, one schedule, and no jump of the loss where the model grows."""
    grow = dict(verify=False)
    stages = [
        dict(steps=4), dict(steps=4, expand=dict(width=48, **grow)), dict(steps=4, expand=dict(depth=2, **grow))
    ]  # fmt: skip
    asked = recipe(steps=None, stages=stages)
    done = run(asked, tmp_path / "out")
    assert done.curve[-1]["step"] == 12
    schedule = Schedule(1e-2, 1e-3, 2, 12)
    for row in done.curve[1:]:
        assert row["learning_rate"] == pytest.approx(schedule.learning_rate(row["step"] - 1), rel=1e-12)
    history = run_folder.last_saved(done.output, {0: 4, 1: 8, 2: 12}).history  # type: ignore[union-attr]
    for step in (4, 8):
        before, after = (line["eval_loss"] for line in history if line["step"] == step and "eval_loss" in line)
        assert_lossless(before, after, 2 * 48)
    config = json.loads((done.output / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (48, 2)
    # What each stage costs is that of a model of its size, the decoder included.
    assert [(stage.start, stage.end) for stage in done.stages] == [(0, 4), (4, 8), (8, 12)]
    assert [stage.flops for stage in done.stages] == [
        4 * step_flops(32, 1),
        4 * step_flops(48, 1),
        4 * step_flops(48, 2),
    ]
    assert json.loads((done.output / "run.json").read_text())["stages"] == [vars(stage) for stage in done.stages]
    assert done.flops == sum(stage.flops for stage in done.stages)

    def stop(step: int, *_: Any) -> None:
        if step == 9:
            raise KeyboardInterrupt

    # Stopped in a stage that has no checkpoint of its own yet: it begins again from the growth.
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "stopped", progress=stop)
    assert [path.name for path in (tmp_path / "stopped").glob("*-*")] == ["stage-2"]
    moments = torch.load(tmp_path / "stopped" / "stage-2" / "optimizer.pt", weights_only=True)["state"]
    # What the added block writes with is new, and so are its moments; all others have seen eight steps.
    assert {int(entry["step"]) for entry in moments.values()} == {0, 8}
    assert_same(done, run(asked, tmp_path / "stopped"))


def test_moments_may_start_anew(tmp_path: Path) -> None:
    """Grown or anew, the first losses after the growth agree, and the first update does not."""

    def losses(moments: str) -> list[float]:
        stages = [dict(steps=3), dict(steps=3, expand=dict(depth=2, verify=False), moments=moments)]
        done = run(recipe(steps=None, stages=stages, eval_every=1), tmp_path / moments)
        return [row["validation_loss"] for row in done.curve]

    grown, anew = losses("grown"), losses("anew")
    assert grown[:4] == anew[:4]
    assert grown[4] != anew[4]


# Knowledge inheritance.


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_loss_of_inheritance(kind: str, trained: FinishedRun, tmp_path: Path) -> None:
    """The first step's loss is half the task's and half the teacher's, both computed here."""
    asked = recipe(inheritance=dict(kind=kind, teacher=str(trained.output)), steps=2, warmup=0, save_every=1)
    done = run(asked, tmp_path / "out")
    prepared = data.prepare("causal-lm", TEXT, config=LLAMA, seed=0)
    from lemonx_lab.training.stream import ExampleStream

    batch = prepared.collate(ExampleStream(prepared.train, 8, 0).__getitems__(range(4)))  # type: ignore[arg-type]
    student = model.fresh("causal-lm", LLAMA, prepared.model, 0)
    teacher = model.loaded("causal-lm", trained.output, {})
    with torch.no_grad():
        out, taught = student(**batch), teacher(**batch).logits
    inherited = inheritance_loss(kind, out.logits, taught, batch["labels"], shifted=True).mean()
    assert done.curve[1]["train_loss"] == pytest.approx(float((out.loss + inherited) / 2), rel=1e-5)


# Other tasks.


def test_images(tmp_path: Path) -> None:
    config = dict(
        model_type="vit", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=4
    )
    images = dict(kind="digits", image_size=16, examples=64, validation_examples=20)
    done = run(recipe(task="image-classification", config=config, data=images), tmp_path / "out")
    assert 0 <= done.final["accuracy"] <= 1
    assert "accuracy" in (done.output / "curve.csv").read_text().splitlines()[0]


def test_sentences(tmp_path: Path) -> None:
    """A masked LM is fine-tuned on real sentences, and learns; its new head is drawn with the seed."""
    wide = dict(hidden_size=32, intermediate_size=64, hidden_dropout_prob=0.0)
    masked = with_changes(MASKED, {"config": {**BERT, **wide}})
    source = run(parse_recipe(masked), tmp_path / "source").output
    sentences = dict(kind="docstrings", question="subject", length=32)
    asked = recipe(task="sequence-classification", config=None, source=str(source), data=sentences, batch_size=32)
    assert_same(run(asked, tmp_path / "out"), run(asked, tmp_path / "again"))
    longer = asked.model_copy(update=dict(steps=100, warmup=10, learning_rate=3e-3, eval_every=100, save_every=0))
    done = run(longer, tmp_path / "longer")
    # Two labels, equally many: chance has this deviation.
    chance = 0.5 / math.sqrt(len(data.prepare(asked.task, sentences, config=None, seed=0).validation))
    assert done.final["accuracy"] > 0.5 + 3 * chance
    assert done.final["validation_loss"] < math.log(2)


# The command line.


def command(
    *arguments: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lemonx", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capfd.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    tools: Any = dict(monkeypatch=monkeypatch, capfd=capfd)
    (tmp_path / "r.yaml").write_text(json.dumps(BASE))  # JSON is YAML
    asked = (tmp_path / "r.yaml", "--output", tmp_path / "out", "--set", "steps=3", "--set", "data.length=16")
    code, out, _ = command("train", *asked, **tools)
    assert code == 0 and "validation loss" in out and f"wrote {tmp_path / 'out'}" in out.replace("\n", "")
    assert json.loads((tmp_path / "out" / "run.json").read_text())["recipe"]["data"]["length"] == 16
    code, out, err = command("train", *asked, **tools)
    assert (code, out) == (5, "") and "holds a finished run" in err
    code, out, _ = command("train", *asked, "--force", "--json", **tools)
    assert code == 0 and json.loads(out)["final"]["step"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("train",), 2, "needs a recipe and an --output folder"),
        (("train", "lm-tiny", "--output", "out"), 2, "is neither a file nor the name of a recipe"),
        (("train", "none.yaml", "--output", "out"), 2, "none.yaml' cannot be read"),
        (("train", "lm-small", "--output", "out", "--set", "stepps=3"), 2, "'stepps' .* did you mean 'steps'"),
        (("train", "lm-small", "--output", "out", "--set", "steps"), 2, "is not KEY=VALUE"),
        (("train", "lm-small", "--output", "out", "--set", "data.kind=poems"), 3, "no data of kind 'poems'"),
        (("train", "glue", "--output", "out"), 2, "give one of source"),
    ],
)
def test_bad_commands(
    arguments: tuple[str, ...], code: int, says: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    found, out, err = command(*arguments, monkeypatch=monkeypatch, capfd=capfd)
    assert (found, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert re.search(says, err), err
    assert list(tmp_path.iterdir()) == []


def test_list(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command("train", "--list", monkeypatch=monkeypatch, capfd=capfd)
    assert code == 0 and "vit-imagenet-lemon" in out
    code, out, _ = command("train", "--list", "--json", monkeypatch=monkeypatch, capfd=capfd)
    assert "bert-wikipedia-lemon-165k" in json.loads(out)


def test_recipe(
    trained: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = api.expand(trained.output, tmp_path / "large", width=64, depth=2, verify=False).path
    own = ("--tokens", "1.6M", "--length", 100, "--batch-size", 16, "--learning-rate", "1e-3")
    for form, says in (("yaml", "steps: 750"), ("arguments", "max_steps=750")):
        code, out, _ = command(
            "recipe", trained.output, target, *own, "--format", form, monkeypatch=monkeypatch, capfd=capfd
        )
        assert code == 0 and says in out
    code, out, _ = command("recipe", trained.output, target, monkeypatch=monkeypatch, capfd=capfd)
    assert code == 0 and "0.75 times as long" in out and "add --steps" in out and "000" not in out
    code, _, err = command("recipe", trained.output, target, "--tokens", "x", monkeypatch=monkeypatch, capfd=capfd)
    assert code == BadRecipe.exit_code and "write it as 300M or 20B" in err
