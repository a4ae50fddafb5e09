"""The parts of a training run: recipe, schedule, inheritance, order of the data, advice."""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import transformers
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lemonx
import pico
from lemonx.cli.render.advising import advice_text, growth_text
from lemonx.errors import BadRecipe, LemonxError
from lemonx.training import advice, recipe_file
from lemonx.training.schedule import Decay, Schedule
from lemonx_lab import data
from lemonx_lab.data.examples import Examples
from lemonx_lab.training import model
from lemonx_lab.training.inheritance import alpha_at, inheritance_loss
from lemonx_lab.training.recipe import Recipe, parse_recipe, read_recipe
from lemonx_lab.training.shipped import shipped
from lemonx_lab.training.stages import legs
from lemonx_lab.training.stream import ExampleStream, Rehearsal

GOOD: dict[str, Any] = {
    "task": "causal-lm",
    "config": {"model_type": "llama", "hidden_size": 32},
    "data": {"kind": "stdlib", "length": 32},
    "steps": 10,
    "batch_size": 4,
    "learning_rate": 1e-2,
}


# The recipe.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"learning_rte": 1}, "'learning_rte' is not a key of a recipe: did you mean 'learning_rate'"),
        ({"optimizer.beta": [0.9, 0.9]}, "'optimizer.beta' .* did you mean 'betas'"),
        ({"expand.widht": 64, "config": None, "source": "x"}, "'expand.widht' .* did you mean 'width'"),
        ({"expand.sizes": {}, "config": None, "source": "x"}, "'expand.sizes' is not a key"),
        ({"steps": None}, "give one of steps, epochs and stages"),
        ({"epochs": 3}, "give one of steps, epochs and stages"),
        ({"source": "x"}, "give one of source .* and config"),
        ({"config": None}, "give one of source .* and config"),
        ({"config.model_type": None}, "config needs a model_type"),
        ({"expand.width": 64}, "expand needs a source"),
        ({"batch_size": None}, "'batch_size' is missing"),
        ({"batch_size": 0}, "batch_size: input should be greater than 0, not 0"),
        ({"batch_size": "many"}, "batch_size: .*integer.*'many'"),
        ({"learning_rate": float("nan")}, "learning_rate: .*finite"),
        ({"min_learning_rate": 1.0}, "min_learning_rate is above learning_rate"),
        ({"gradient_accumulation": 3}, "not a multiple of gradient_accumulation"),
        ({"warmup": 1, "warmup_epochs": 1}, "give one of warmup"),
        ({"decay": "exponential"}, "decay: .*'cosine', 'linear', 'wsd' or 'constant'"),
        ({"cooldown": 0.2}, "cooldown is the part of a run over which decay: wsd decays"),
        ({"decay": "wsd", "cooldown": 1.5}, "cooldown: .*less than or equal to 1"),
        ({"decay": "constant", "min_learning_rate": 1e-3}, "a constant rate never falls"),
        ({"optimizer.betas": [0.9, 1.0]}, "optimizer: betas lie in"),
        ({"inheritance.kind": "soft"}, "inheritance needs a teacher"),
        ({"steps": None, "stages": [{"steps": 2}, {"steps": 3}]}, "every stage after the first needs an expand"),
        ({"steps": None, "stages": [{"steps": 2, "expand": {"width": 64}}]}, "trains the config from scratch"),
        ({"steps": None, "stages": [{"step": 2}]}, "'stages.0.step' .* did you mean 'steps'"),
        ({"task": "chat"}, "task: .*'causal-lm'"),
    ],
)
def test_a_recipe_that_cannot_be_followed(change: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRecipe, match=says) as caught:
        parse_recipe(recipe_file.with_changes(GOOD, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("task: causal-lm\ntask: masked-lm\n", "'task' is given twice"),
        ("data: {kind: stdlib, kind: text}\n", "'kind' is given twice"),
        ("task: !!python/object/apply:os.system [echo]\n", "could not determine a constructor"),
        ("- task\n", "write keys and values"),
        ("task: [\n", "is not a recipe in YAML"),
        ("? [a, b]\n: 1\n", "write keys and values|is not a recipe in YAML"),
    ],
)
def test_yaml_that_is_not_read(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(BadRecipe, match=says) as caught:
        read_recipe(tmp_path / "r.yaml")
    assert "\n" not in str(caught.value)


def test_numbers_of_a_recipe_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("config: {layer_norm_eps: 1e-6, a: -2E+3, b: 1.e5, c: 12, d: 1e}\n")
    found = recipe_file.load_yaml(tmp_path / "r.yaml")["config"]
    assert found == {"layer_norm_eps": 1e-6, "a": -2e3, "b": 1e5, "c": 12, "d": "1e"}


def test_a_recipe_says_itself_again() -> None:
    stages = [{"steps": 2}, {"steps": 3, "expand": {"width": 64, "set": {"intermediate_size": 7}}}]
    asked = parse_recipe(recipe_file.with_changes(GOOD, {"steps": None, "stages": stages}))
    assert parse_recipe(asked.as_dict()) == asked
    assert asked.stages[1].expand is not None
    assert asked.stages[1].expand.options["set"] == {"intermediate_size": 7}


def test_epochs_are_steps_of_whole_batches() -> None:
    asked = parse_recipe(recipe_file.with_changes(GOOD, {"steps": None, "epochs": 3, "warmup_epochs": 0.5}))
    assert (asked.total_steps(100), asked.warmup_steps(100)) == (75, 12)
    none = parse_recipe(recipe_file.with_changes(GOOD, {"steps": None, "epochs": 3, "warmup_epochs": 0}))
    assert none.warmup_steps(100) == 0


# What the full recipes leave to the reader.
_GIVEN = {"source": "folder", "data.path": "folder", "data.name": "cola", "data.tokenizer": "folder"}


@pytest.mark.parametrize("name", shipped())
def test_recipes_that_ship(name: str) -> None:
    """Every one says what it is, and is a recipe once what it asks for is given; a model of its config exists."""
    first = shipped()[name]
    assert len(first) > 20
    needs = first.partition("Needs ")[2]
    changes = {key: value for key, value in _GIVEN.items() if key in needs}
    asked = read_recipe(name, changes)
    data.options(asked.task, asked.data)
    if asked.config is not None:
        with torch.device("meta"):
            model.fresh(asked.task, asked.config, {}, 0)


@pytest.mark.parametrize(
    ("name", "length"),
    [("vit-imagenet", 300), ("vit-imagenet-lemon", 130), ("bert-wikipedia", 220_000),
     ("bert-wikipedia-lemon-165k", 165_000), ("bert-wikipedia-lemon-132k", 132_000), ("glue", 3)],
)  # fmt: skip
def test_the_papers_settings(name: str, length: int) -> None:
    asked = read_recipe(name, {"source": "x"} if "lemon" in name or name == "glue" else {})
    kind = "vision" if name.startswith("vit") else "language"
    paper = advice.SCRATCH[kind]
    assert (asked.epochs or asked.steps) == length
    if name == "glue":
        assert (asked.learning_rate, asked.batch_size) == (1e-4, 32)
        return
    assert (asked.learning_rate, asked.min_learning_rate) == (paper.maximum, paper.minimum)
    assert (asked.warmup_epochs or asked.warmup, asked.batch_size) == (paper.warmup, paper.batch_size)
    assert length in (paper.length, *(known.length for known in advice.EVIDENCE))
    assert (asked.expand.free if asked.expand else None) == (kind if "lemon" in name else None)


# The schedule.


def test_the_papers_schedule() -> None:
    """ViT: 5 epochs up to 1e-3, then a cosine to 1e-5 at epoch 300; LEMON: the same to epoch 130."""
    epoch = 1251  # of ImageNet, in batches of 1024
    scratch = Schedule(1e-3, 1e-5, 5 * epoch, 300 * epoch)
    lemon = Schedule(1e-3, 1e-5, 5 * epoch, 130 * epoch)
    for schedule, last in ((scratch, 300), (lemon, 130)):
        at = {
            0: 0.0,
            1: 2e-4,
            5: 1e-3,
            # a third of the way down, cos(pi / 3) = 1/2: three quarters of the way from minimum to maximum
            5 + (last - 5) / 3: 1e-5 + 0.75 * 9.9e-4,
            (5 + last) / 2: 5.05e-4,
            last: 1e-5,
        }
        for where, rate in at.items():
            step = round(where * epoch)
            # a step is not exactly where the fraction is: the slope is at most pi/2 (max - min) / length
            slack = math.pi / 2 * 9.9e-4 / (last * epoch)
            assert schedule.learning_rate(step) == pytest.approx(rate, abs=slack), (last, where)


def test_linear_decay() -> None:
    schedule = Schedule(1.0, 0.2, 10, 110, "linear")
    assert [schedule.learning_rate(step) for step in (5, 10, 60, 110)] == pytest.approx([0.5, 1.0, 0.6, 0.2], rel=1e-15)


@given(
    st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.integers(0, 50), st.integers(1, 200), st.sampled_from(range(300)),
    st.sampled_from(get_args(Decay)), st.floats(0.0, 1.0),
)  # fmt: skip
def test_a_schedule_stays_between_its_bounds(
    maximum: float, part: float, warmup: int, more: int, step: int, decay: Decay, cooldown: float
) -> None:
    schedule = Schedule(maximum, part * maximum, warmup, warmup + more, decay, round(cooldown * more))
    assert 0.0 <= schedule.learning_rate(step) <= maximum * (1 + 1e-15)
    if step >= warmup:
        assert schedule.learning_rate(step) >= schedule.learning_rate(step + 1) >= part * maximum * (1 - 1e-15)


@given(
    st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.integers(0, 50), st.integers(0, 200), st.integers(1, 200),
    st.integers(0, 450),
)  # fmt: skip
def test_wsd(maximum: float, part: float, warmup: int, stable: int, cooldown: int, step: int) -> None:
    """Three lines: up, along, down. The formula is written out here once more."""
    total, minimum = warmup + stable + cooldown, part * maximum
    found = Schedule(maximum, minimum, warmup, total, "wsd", cooldown).learning_rate(step)
    if step < warmup:
        wanted = maximum * step / warmup
    elif step <= warmup + stable:
        wanted = maximum
    else:
        wanted = minimum + (maximum - minimum) * max(0, total - step) / cooldown
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-18)
    forever = Schedule(maximum, 0.0, warmup, total, "constant").learning_rate(step)
    assert forever == pytest.approx(maximum * step / warmup if step < warmup else maximum, rel=1e-15)


def test_the_cooldown_of_a_recipe() -> None:
    """A fifth of the run unless it says otherwise, over all stages together."""

    def asked(**changes: Any) -> Recipe:
        return parse_recipe(recipe_file.with_changes(GOOD, {"learning_rate": 1e-3, **changes}))

    assert asked(decay="wsd", steps=100, warmup=10).schedule(1000) == Schedule(1e-3, 0.0, 10, 100, "wsd", 20)
    assert asked(decay="wsd", cooldown=0.5, steps=101).schedule(1000).cooldown == 51
    stages = [{"steps": 60}, {"steps": 40, "expand": {"depth": 2}}]
    staged = asked(decay="wsd", steps=None, stages=stages, cooldown=0.1).schedule(1000)
    assert [staged.learning_rate(step) for step in (0, 59, 60, 90, 95)] == [1e-3, 1e-3, 1e-3, 1e-3, 5e-4]
    assert asked(steps=100).schedule(1000) == Schedule(1e-3, 0.0, 0, 100)


@pytest.mark.parametrize(
    ("steps", "warmup", "more", "wanted"),
    [(100, 99, {}, 99), (100, 100, {}, 10), (12, 50, {}, 1), (5, 50, {}, 0),
     (100, 60, {"decay": "wsd", "cooldown": 0.5}, 10), (100, 60, {"decay": "wsd", "cooldown": 0.95}, 5)],
)  # fmt: skip
def test_a_short_run_shortens_its_warmup(steps: int, warmup: int, more: dict[str, Any], wanted: int) -> None:
    changes = {"learning_rate": 1e-3, "steps": steps, "warmup": warmup, **more}
    found = parse_recipe(recipe_file.with_changes(GOOD, changes)).schedule(1000)
    assert (found.warmup, found.total) == (wanted, steps)
    assert max(map(found.learning_rate, range(steps))) == 1e-3


# Knowledge inheritance.


def _logits(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows).log()


def test_inheritance_by_hand() -> None:
    """p_student = (1/4, 3/4); p_teacher = (1/2, 1/2), then (1/5, 4/5): KL and cross-entropy on paper."""
    student = _logits((0.25, 0.75), (0.25, 0.75), (0.9, 0.1))
    teacher = _logits((0.5, 0.5), (0.2, 0.8), (0.5, 0.5))
    labels = torch.tensor([0, 1, -100])
    soft = inheritance_loss("soft", student, teacher, labels, shifted=False)
    second = 0.2 * math.log(0.2 / 0.25) + 0.8 * math.log(0.8 / 0.75)
    assert soft.tolist() == pytest.approx([0.5 * math.log(4 / 3), second], rel=1e-5)
    hard = inheritance_loss("hard", student[1:], teacher[1:], labels[1:], shifted=False)
    assert hard.tolist() == pytest.approx([-math.log(0.75)], rel=1e-6)


def test_inheritance_of_a_causal_model_is_shifted() -> None:
    """Position i is judged by label i + 1: the last position has no label, the first label no position."""
    student = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    teacher = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[-100, 1, -100, 2], [0, 1, 2, -100]])
    used = [(0, 0), (0, 2), (1, 0), (1, 1)]
    found = inheritance_loss("hard", student, teacher, labels, shifted=True)
    wanted = [float(-student[i, j].log_softmax(0)[teacher[i, j].argmax()]) for i, j in used]
    assert found.tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_teacher_equal_to_the_student_adds_nothing() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    assert inheritance_loss("soft", logits, logits, torch.zeros(3), shifted=False).abs().max() == 0


def test_alpha_falls_linearly() -> None:
    assert [alpha_at(step, 200, 0.5) for step in (0, 50, 100, 200, 300)] == [0.5, 0.375, 0.25, 0.0, 0.0]


# The order of the data.


class Numbers(Examples):
    """Example i is (i, epoch)."""

    def __getitems__(self, indices: Any) -> list[dict[str, Tensor]]:
        return [{"x": torch.tensor([index, self._epoch])} for index in indices]


@given(st.integers(1, 20), st.integers(0, 5), st.lists(st.integers(1, 7), min_size=1, max_size=30))
def test_a_stream_is_the_same_however_it_is_cut(size: int, seed: int, batches: list[int]) -> None:
    length = sum(batches)
    whole = [
        item["x"].tolist() for item in ExampleStream(Numbers(size, seed=0), length, seed).__getitems__(range(length))
    ]
    cut, at, stream = [], 0, ExampleStream(Numbers(size, seed=0), length, seed)
    for batch in batches:
        cut.append([item["x"].tolist() for item in stream.__getitems__(range(at, at + batch))])
        at += batch
    assert list(chain(*cut)) == whole
    # Every example once an epoch, and the data knows the epoch.
    for epoch in range(length // size):
        part = whole[epoch * size : (epoch + 1) * size]
        assert sorted(index for index, _ in part) == list(range(size))
        assert {at for _, at in part} == {epoch}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        stream = ExampleStream(Numbers(50, seed=0), 500, seed)
        return [int(item["x"][0]) for item in stream.__getitems__(range(50 * epoch, 50 * epoch + 50))]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(1, 12), st.integers(0, 3))
def test_a_rehearsed_batch_has_its_share_of_every_stream(counts: list[int], steps: int, seed: int) -> None:
    """Batch by batch each stream goes on where it was, as it would alone."""
    alone = [ExampleStream(Numbers(7 + i, seed=0), steps * count, seed) for i, count in enumerate(counts)]
    mixed, size = Rehearsal(alone, counts), sum(counts)
    assert len(mixed) == steps * size
    for step in range(steps):
        batch = [item["x"].tolist() for item in mixed.__getitems__(range(step * size, (step + 1) * size))]
        wanted = [
            item["x"].tolist()
            for stream, count in zip(alone, counts, strict=True)
            for item in stream.__getitems__(range(step * count, (step + 1) * count))
        ]
        assert batch == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rehearse": {"old": 0.5}, "beside": {}}, "not among the sections of beside"),
        ({"rehearse": {"old": 0.01}}, "every batch needs examples"),
        ({"rehearse": {"old": 0.99}}, "every batch needs examples"),
        ({"rehearse": {"old": 1.5}}, "less than 1"),
        (
            {"rehearse": {"old": 0.5}, "beside": {"old": GOOD["data"]}, "steps": None, "epochs": 2.0},
            "instead of epochs",
        ),
    ],
)
def test_rehearsals_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRecipe, match=message):
        parse_recipe(recipe_file.with_changes({**GOOD, "beside": {"old": GOOD["data"]}}, changes))


# Stages.


def test_legs_follow_each_other() -> None:
    stages = [{"steps": 3}, {"steps": 4, "expand": {"width": 64}}, {"steps": 1, "expand": {"depth": 4}}]
    asked: Recipe = parse_recipe(recipe_file.with_changes(GOOD, {"steps": None, "stages": stages}))
    assert [(leg.start, leg.end) for leg in legs(asked, asked.total_steps(0))] == [(0, 3), (3, 7), (7, 8)]


# Configs.


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "config.model_type is 'lama', which transformers does not know"),
        ({"model_type": "llama", "hiden_size": 3}, "config.hiden_size is not a field of a llama: did you mean 'hidden"),
        ({"model_type": "llama", "vocab_size": 3}, "config.vocab_size is 3, but the data has 61"),
        ({"model_type": "vit"}, "config: transformers cannot build a model for causal-lm"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(LemonxError, match=says):
        model.fresh("causal-lm", config, {"vocab_size": 61}, 0)


# Advice.


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A ViT (2, 48), and the config of one twice as deep and wide: an eighth of its weights."""
    folder = tmp_path_factory.mktemp("grown")
    source = pico.save(pico.PICO["vit-cls"](), folder / "source")
    wider = transformers.ViTConfig.from_pretrained(source)
    wider.update(dict(hidden_size=96, num_hidden_layers=4, num_attention_heads=8, intermediate_size=192))
    wider.save_pretrained(folder / "target")
    return source, folder / "target"


@pytest.mark.parametrize("known", advice.EVIDENCE, ids=str)
def test_the_papers_growths_get_the_papers_lengths(known: advice.Evidence) -> None:
    assert advice.nearest(known.kind, known.share, known.deepens) == known


OWN = {"learning_rate": 0.1, "batch_size": 64}


def test_advice_is_relative_to_the_users_own_training(grown: tuple[Path, Path]) -> None:
    """130 of the paper's 300 epochs are a fraction of whatever the user would train from scratch."""
    found = advice.growth(*grown)
    assert found.share == pytest.approx(1 / 8) and found.fraction == pytest.approx(130 / 300)
    given = advice.advise(found, advice.OwnTraining(steps=3000, **OWN))
    assert (given.length, given.warmup, given.unit) == (1300, 0, "steps")
    assert (given.maximum, given.batch_size) == (0.1, 64) and given.minimum == pytest.approx(0.001)
    tokens = advice.OwnTraining(tokens=3000 * 64 * 16, length=16, **OWN)
    assert advice.advise(found, tokens) == given
    with pytest.raises(BadRecipe, match="given twice"):
        advice.OwnTraining(steps=3, tokens=5)
    with pytest.raises(BadRecipe, match="above the maximum"):
        advice.OwnTraining(steps=3, **OWN, min_learning_rate=0.2)
    with pytest.raises(BadRecipe, match="a warm-up of 200 leaves nothing of 100"):
        advice.OwnTraining(steps=100, warmup=200, **OWN)
    with pytest.raises(BadRecipe, match="a warm-up of 200 leaves nothing of 100"):
        advice.OwnTraining(tokens=100 * 64 * 16, length=16, warmup=200, **OWN)


@pytest.mark.parametrize(
    ("sizes", "how", "warmup"),
    [({"width": 96}, {}, 0), ({"width": 72}, {}, 0), ({"depth": 4}, {}, 0), ({"depth": 4}, {"method": "gstack"}, 50)],
    ids=["copies", "part", "depth", "lossy"],
)
def test_a_lossless_growth_is_advised_no_warmup(
    sizes: dict[str, Any], how: dict[str, Any], warmup: int, grown: tuple[Path, Path], tmp_path: Path
) -> None:
    """Whatever grew, as README says. What another method changed keeps the warm-up of training from scratch."""
    target = lemonx.expand(grown[0], tmp_path / "target", verify=False, **sizes, **how).path
    found = advice.growth(grown[0], target)
    given = advice.advise(found, advice.OwnTraining(steps=3000, **OWN))
    assert given.warmup == warmup
    for text in (advice_text(given, "yaml"), growth_text(found, [])):
        assert ("without one, lossless starts" in " ".join(text.replace("#", "").split())) == (warmup == 0)
    once = advice.advise(found, advice.OwnTraining(steps=2, warmup=1, **OWN))
    assert "# 1 step, " in advice_text(once, "yaml")
    asked = advice.advise(found, advice.OwnTraining(steps=3000, warmup=7, **OWN))
    assert asked.warmup == 7 and "warm-up of 7 steps" in advice_text(asked, "yaml")
    # Longer than what is left beside the decay of the shortened run: a tenth of that run, as `lemonx train` has it.
    long = advice.advise(found, advice.OwnTraining(steps=3000, warmup=2900, **OWN), "wsd")
    assert long.warmup == long.length // 10 == long.schedule().warmup


def test_a_ramp_is_advised_for_a_decoder_whose_new_layers_write_nothing(tmp_path: Path) -> None:
    """Not where no layer was added, where they come in by a ramp already, or where another method added them."""
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "s")
    for name, options, advised in (
        ("deep", {"depth": 4}, True),
        ("wide", {"width": 96}, False),
        ("ramp", {"depth": 4, "free": {"ramp": True}}, False),
        ("stack", {"depth": 4, "method": "gstack"}, False),
    ):
        found = advice.growth(source, lemonx.expand(source, tmp_path / name, verify=False, **options).path)
        given = advice.advise(found, advice.OwnTraining(steps=3000, **OWN))
        for text in (advice_text(given, "yaml"), growth_text(found, [])):
            assert ("--free '{placement: stacked, ramp: true}'" in " ".join(text.split())) == advised, name


@pytest.mark.parametrize(
    ("own", "lacks"),
    [({}, "--steps (or --epochs, or --tokens), --learning-rate, --batch-size"),
     ({"steps": 5}, "--learning-rate, --batch-size"),
     ({"tokens": 5, **OWN}, "--length (tokens of an example)")],
)  # fmt: skip
def test_advice_asks_for_what_it_lacks(own: dict[str, Any], lacks: str, grown: tuple[Path, Path]) -> None:
    """No number of the paper's models is given as advice: only the fraction, and what to add."""
    found, given = advice.growth(*grown), advice.OwnTraining(**own)
    text = " ".join(growth_text(found, given.lacking).replace("# ", "").split())
    assert "0.43 times as long" in text and text.endswith(f"add {lacks}.")
    assert not re.search(r"\b(130|300|1024|0\.001|1e-0?3)\b", text)
    with pytest.raises(BadRecipe, match=re.escape(lacks)):
        advice.advise(found, given)


@pytest.mark.parametrize(
    ("name", "method", "sizes"),
    [("gpt2-lm", "gstack", {"depth": 4}), ("mixtral", "expert-groups", {"set": {"num_local_experts": 8}})],
    ids=["gstack", "expert-groups"],
)
def test_a_target_that_another_method_made(
    name: str, method: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sizes may be ones that LEMON refuses, and the paper's length is not for it."""
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", method=method, verify=False, **sizes).path
    (tmp_path / "link").symlink_to(target)
    monkeypatch.chdir(tmp_path)
    for way in (target, "target", "./target", "link", "target/config.json"):
        found = advice.growth("source", way)
        assert found.lossy == method
        text = " ".join(growth_text(found, []).replace("# ", "").split())
        assert f"but {method} made this target, and is not lossless" in text


def test_the_advice_for_added_blocks_that_open_has_their_ramp(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["gpt2-lm"](), tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", depth=4, free={"ramp": True}, verify=False).path
    found = advice.growth(source, target / "config.json")
    text = advice_text(advice.advise(found, advice.OwnTraining(steps=100, **OWN)), "yaml")
    asked = parse_recipe(yaml.safe_load(text))
    assert asked.source == str(target) and asked.ramp == 6 == round(0.1 * (asked.steps or 0))
    assert "a ramp of 6 steps" in text
    in_epochs = advice_text(advice.advise(found, advice.OwnTraining(epochs=100, **OWN)), "yaml")
    assert "ramp" not in yaml.safe_load(in_epochs) and "add it, in steps" in in_epochs


def test_advice_is_a_recipe(grown: tuple[Path, Path]) -> None:
    text = advice_text(advice.advise(advice.growth(*grown), advice.OwnTraining(epochs=30, **OWN)), "yaml")
    asked = parse_recipe(yaml.safe_load(text))
    assert (asked.task, asked.epochs, asked.source) == ("image-classification", 13, str(grown[1]))
    assert "0.43 of your 30 from scratch" in text and "43% as long" in text


def test_advice_may_be_a_wsd_recipe(grown: tuple[Path, Path]) -> None:
    found = advice.advise(advice.growth(*grown), advice.OwnTraining(epochs=300, **OWN), "wsd")
    asked = parse_recipe(yaml.safe_load(advice_text(found, "yaml")))
    assert (asked.decay, asked.min_learning_rate) == ("wsd", 0.0)
    assert asked.schedule(7 * 64) == found.schedule(7)  # 7 batches an epoch
    with pytest.raises(BadRecipe, match="give --steps"):
        advice_text(found, "arguments")


@pytest.mark.parametrize(("unit", "decay"), [("steps", "cosine"), ("epochs", "cosine"), ("steps", "wsd")])
def test_advice_as_arguments_is_the_same_schedule(
    unit: str, decay: Literal["cosine", "wsd"], grown: tuple[Path, Path], tmp_path: Path
) -> None:
    own = advice.OwnTraining(**{unit: 300}, **OWN)
    found = advice.advise(advice.growth(*grown), own, decay)
    text = advice_text(found, "arguments").replace("OUTPUT", str(tmp_path))
    made = eval(text[text.index("TrainingArguments") :], {"TrainingArguments": transformers.TrainingArguments})
    each = 1 if unit == "steps" else 7  # steps of an epoch
    total = found.length * each
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=made.learning_rate)
    theirs = transformers.get_scheduler(
        made.lr_scheduler_type, optimizer, made.get_warmup_steps(total), total, made.lr_scheduler_kwargs
    )
    ours = found.schedule(each)
    for step in range(total):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(ours.learning_rate(step), rel=1e-12), step
        optimizer.step()
        theirs.step()
