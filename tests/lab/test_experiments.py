"""Experiments: the answer to the paper's question on hand-made numbers, and one that really runs."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest

import lemonx
import pretend
from lemonx.errors import BadRecipe, LemonxError, Stopped
from lemonx.models.building import new_model
from lemonx_lab.experiments import compare, fingerprint, nodes, wording
from lemonx_lab.experiments.answer import (
    AT_MOST,
    INTERPOLATED,
    NOT_REACHED,
    Costs,
    forgettings,
    head_starts,
    reach,
    saved,
    steps_to,
)
from lemonx_lab.experiments.pool import run_all
from lemonx_lab.experiments.result_file import ArmResult
from lemonx_lab.experiments.spec import Experiment, parse

TINY = {
    "name": "tiny",
    "title": "two steps of a tiny Llama",
    "claim": "none",
    "cost": "seconds",
    "command": "pytest",
    "paper": {"finding": "none"},
    "lengths": [0.5, 1.0],
    "seeds": [0, 1],
    "train": {
        "task": "causal-lm",
        "data": {"kind": "stdlib", "length": 16, "validation_examples": 4},
        "batch_size": 2,
        "eval_every": 2,
    },
    "sources": {
        "source": {
            "config": {
                "model_type": "llama",
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 32,
                "head_dim": 8,
                "max_position_embeddings": 16,
            },
            "steps": 4,
            "learning_rate": 1e-2,
        }
    },
    "target": {"expand": {"width": 24, "depth": 2}, "train": {"steps": 4, "learning_rate": 1e-2}},
    "arms": [
        {"label": "scratch", "method": "scratch", "lengths": [1.0]},
        {"label": "LEMON"},
        {"label": "KI", "method": "ki-hard", "lengths": [1.0]},
    ],
    "quick": {"seeds": [0], "lengths": [1.0]},
}


def tiny(**changes: object) -> Experiment:
    return parse({**TINY, **changes}, Path("tiny"))


def compared_here(asked: Experiment, folder: Path) -> Any:
    """The result of an experiment whose pieces were made in this process: its own would import everything anew."""
    cache = folder / "cache"

    def make(node: nodes.Node) -> None:
        for other in node.after:
            make(other)
        if not node.done(cache):
            nodes.run_node(node, cache)

    for cell in nodes.cells(asked):
        make(cell.trained)
    return compare.compare(asked, folder / "out", cache=cache, tell=pytest.fail)


def test_steps_to_the_mark() -> None:
    """Interpolated in log steps: half the gap between 100 and 400 is 200."""
    points = [(400.0, 1.0), (100.0, 2.0)]
    assert steps_to(1.5, points, "lower") == (200.0, INTERPOLATED)
    assert steps_to(2.0, points, "lower") == (100.0, AT_MOST)
    assert steps_to(0.9, points, "lower") == (None, NOT_REACHED)
    assert steps_to(0.75, [(100, 0.5), (400, 1.0)], "higher") == (200.0, INTERPOLATED)


def test_reach_over_seeds() -> None:
    points = {0: [(100, 2.0), (400, 1.0)], 1: [(100, 1.4), (400, 1.0)]}
    answer = reach({0: 1.5, 1: 1.5}, points, "lower")
    assert answer.steps is not None and answer.steps.by_seed == [200.0, 100.0]
    assert answer.steps.mean == 150.0 and answer.steps.spread == pytest.approx(70.7107, abs=1e-3)
    assert answer.bound == AT_MOST
    missed = reach({0: 0.9, 1: 1.2}, points, "lower")
    assert missed.steps is None and missed.reached == 1
    assert missed.short_of == pytest.approx((0.1 - 0.2) / 2)


def test_what_is_saved_with_and_without_the_source() -> None:
    """A target at 200 of 1000 steps saves 80 %; a source that cost 100 steps' worth leaves 70 %."""
    points = {0: [(100, 2.0), (400, 1.0)]}
    parts = saved(reach({0: 1.5}, points, "lower"), Costs(10.0, 1000.0, 1000), Costs(10.0, 0.0, 1000))
    assert parts is not None
    assert [one.mean for one in (parts.steps, parts.flops, parts.flops_with_source)] == pytest.approx([0.8, 0.8, 0.7])
    # A baseline that is grown has a source too: 300 of 1100.
    parts = saved(reach({0: 1.5}, points, "lower"), Costs(10.0, 1000.0, 1000), Costs(10.0, 1000.0, 1000))
    assert parts is not None and parts.flops.mean == pytest.approx(0.8)
    assert parts.flops_with_source.mean == pytest.approx(8 / 11)
    assert saved(reach({0: 0.5}, points, "lower"), Costs(10.0, 0.0, 1000), Costs(10.0, 0.0, 1000)) is None


def test_equal_pieces_are_one_piece_and_changed_ones_are_not() -> None:
    first, second = list(nodes.cells(tiny())), list(nodes.cells(tiny(name="other", title="again")))
    assert [cell.trained.key for cell in first] == [cell.trained.key for cell in second]
    longer = {**TINY["train"], "batch_size": 4}
    assert not {c.trained.key for c in first} & {c.trained.key for c in nodes.cells(tiny(train=longer))}
    # Knowledge inheritance starts where scratch starts, and is another training.
    scratch, ki = (next(c.trained for c in first if c.arm == label) for label in ("scratch", "KI"))
    assert scratch.after[0].key == ki.after[0].key and scratch.key != ki.key


def test_the_files_that_data_name_are_part_of_a_result_s_name(tmp_path: Path) -> None:
    def keys(section: dict[str, object], **more: object) -> set[str]:
        fingerprint.files.cache_clear()  # as in another process
        return {cell.trained.key for cell in nodes.cells(tiny(train={**TINY["train"], "data": section, **more}))}

    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one")
    folder, file = ({"kind": "text", "path": str(path)} for path in (text, text / "a.txt"))
    beside = {"beside": {"old": file}}
    before = keys(folder), keys(file), keys(TINY["train"]["data"], **beside)
    assert before == (keys(folder), keys(file), keys(TINY["train"]["data"], **beside))
    (text / "a.txt").write_text("two")
    after = keys(folder), keys(file), keys(TINY["train"]["data"], **beside)
    assert not any(one & other for one, other in zip(before, after, strict=True))
    (text / "b.txt").write_text("three")
    assert not keys(folder) & after[0] and keys(file) == after[1]


def test_the_code_that_decides_a_result_is_part_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment is not, and a change of the growth leaves trained models as they are."""
    rooms = {*fingerprint.GROWTH, *fingerprint.TRAINING}
    assert all(any((fingerprint.SOURCES / room).rglob("*.py")) for room in rooms)
    for room in rooms:
        shutil.copytree(fingerprint.SOURCES / room, tmp_path / room)
    monkeypatch.setattr(fingerprint, "SOURCES", tmp_path)

    def digests() -> list[str]:
        fingerprint.fingerprint.cache_clear()
        return [fingerprint.fingerprint(rooms)["code"] for rooms in (fingerprint.GROWTH, fingerprint.TRAINING)]

    module = tmp_path / "lemonx" / "specs" / "norms.py"
    before = digests()
    module.write_text(f"# A remark.\n{module.read_text()}")
    assert digests() == before
    module.write_text(f"{module.read_text()}\nMORE = 1\n")
    grown, trained = digests()
    assert grown != before[0] and trained == before[1]
    monkeypatch.undo()
    fingerprint.fingerprint.cache_clear()


@pytest.mark.parametrize("name", compare.names())
def test_shipped_experiments_are_whole(name: str) -> None:
    """Each has a claim, a cost and its command, and every recipe in it is one."""
    from lemonx_lab.data.kinds import options
    from lemonx_lab.training.recipe import parse_recipe

    experiment = compare.find(name)
    assert experiment.claim and experiment.cost and experiment.name == name
    assert experiment.command == f"lemonx compare {name}"
    for cell in nodes.cells(experiment):
        for node in (cell.source, cell.trained, *cell.downstream.values()):
            recipe = parse_recipe({**node.what, **({"source": "x"} if node.after else {})}, name)
            options(recipe.task, recipe.data)


@pytest.mark.parametrize("name", compare.names())
def test_every_growth_of_a_shipped_experiment_is_defined(name: str, tmp_path: Path) -> None:
    """Of one seed: a method that refuses a growth would stop a comparison in the middle."""
    experiment = compare.find(name)
    sources: dict[str, Path] = {}
    for cell in nodes.cells(experiment.model_copy(update={"seeds": (0,)})):
        for grown in (node for node in cell.trained.after if node.kind == nodes.GROWN):
            (source,) = grown.after
            config = source.what.get("config")
            if not isinstance(config, dict):
                continue  # itself grown
            if source.key not in sources:
                sources[source.key] = tmp_path / source.key
                vocabulary = {} if "vit" in str(config["model_type"]) else {"vocab_size": 131}
                new_model({**config, **vocabulary}, 0).save_pretrained(sources[source.key])
            options: dict[str, Any] = dict(grown.what)
            lemonx.plan(sources[source.key], **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"baseline": "nothing"}, "is not an arm"),
        ({"arms": [{"label": "scratch", "source": "x"}]}, "not among the sources"),
        ({"arms": [{"label": "scratch"}, {"label": "scratch"}]}, "one label"),
        ({"lengths": [0.0]}, "lengths.0: Input should be greater than 0"),
        ({"speed": 3}, "speed"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [0, 0]}, "a seed stands twice"),
        ({"lengths": []}, "lengths"),
        ({"target": {"expand": {}, "train": {"steps": 0}}}, "target.train needs steps"),
        ({"target": {"expand": {}, "train": {"steps": True}}}, "target.train needs steps"),
        ({"quick": {"seeds": [0], "arms": ["LEMON"]}}, "quick leaves out 'scratch', which sets the mark"),
        ({"quick": {"seeds": [0], "arms": ["scratch", "lemon"]}}, "quick has 'lemon', which is not an arm"),
        ({"arms": [{"label": "scratch", "train": {"steps": 3}}]}, "has steps, which are not used"),
        ({"lengths": [0.5, 0.5, 1.0]}, "arm 'LEMON' has two lengths of equal steps"),
        ({"lengths": [0.5, 0.55, 1.0]}, "arm 'LEMON' has two lengths of equal steps"),
        ({"sources": {"source": {"epochs": 1}}}, "source 'source' needs steps"),
        ({"downstream": [{"name": "a", "metric": "b", "train": {}}] * 2}, "two downstream tasks have one name"),
    ],
)
def test_an_experiment_that_makes_no_sense(change: dict[str, object], says: str) -> None:
    with pytest.raises(BadRecipe, match=says):
        tiny(**change)


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ({"train": {"decay": "wds"}}, "wrong, 4 steps, seed 0: decay: .*'wsd'"),
        ({"train": {"cooldown": 0.2}}, "wrong, 4 steps, seed 0: cooldown is the part"),
        ({"expand": {"free": {"rest": "mine"}}}, "wrong, seed 0: the free parameter rest is 'mine'"),
        ({"expand": {"widht": 64}}, "wrong, seed 0: 'widht' is not a key of a growth: did you mean 'width'"),
        ({"expand": {"free": {"ramp": 5}}}, "wrong, seed 0: the free parameter ramp is 5"),
    ],
)
def test_an_arm_that_makes_no_sense_is_found_before_anything_runs(
    arm: dict[str, object], says: str, tmp_path: Path
) -> None:
    arms = [{"label": "scratch", "method": "scratch", "lengths": [1.0]}, {"label": "wrong", "lengths": [1.0], **arm}]
    with pytest.raises(BadRecipe, match=says):
        compare.compare(tiny(arms=arms), tmp_path / "out", cache=tmp_path / "cache", tell=pytest.fail)
    assert not (tmp_path / "cache").exists()


def test_arms_may_have_another_start_and_another_schedule(tmp_path: Path) -> None:
    """Own copies with a ramp, under WSD, from a source that was never decayed: lossless at step 0 as well."""
    wsd = {"decay": "wsd", "cooldown": 0.5}
    start = {"label": "own", "expand": {"free": {"like": "own", "placement": "stacked", "ramp": True}}}
    arms = [{"label": "scratch", "method": "scratch", "train": wsd}, {**start, "train": {"ramp": 2, **wsd}}]
    source = {**TINY["sources"]["source"], "decay": "constant"}
    asked = tiny(arms=arms, sources={"source": source}, seeds=[0], lengths=[1.0])
    content = compared_here(asked, tmp_path)
    own = next(arm for arm in content.arms if arm.label == "own").runs[0]
    assert own.start == pytest.approx(own.source, rel=1e-5)
    assert own.final != own.start


def test_growth_inside_and_training_without_growth(tmp_path: Path) -> None:
    """A source grown from another counts both; the mark is that of the better scratch; old examples are looked at."""
    first = {**TINY["sources"]["source"], "decay": "constant", "learning_rate": 1e-3}
    second = {"grown": {"from": "source", "width": 32, "free": "inside"}, "steps": 2, "learning_rate": 1e-3}
    wsd = {"decay": "wsd", "cooldown": 0.5, "learning_rate": 1e-6}  # hardly moves: the worse of the two
    arms = [
        {"label": "slow", "method": "scratch", "train": wsd},
        {"label": "scratch", "method": "scratch", "lengths": [0.5, 1.0]},
        {"label": "two growths", "source": "wider", "lengths": [1.0]},
        {"label": "as it is", "method": "none", "lengths": [1.0]},
    ]
    train = {**TINY["train"], "beside": {"old": TINY["train"]["data"]}}
    target = {"expand": {"width": 32, "depth": 2}, "train": TINY["target"]["train"]}
    asked = tiny(arms=arms, sources={"source": first, "wider": second}, train=train, target=target, baseline="slow")
    asked = asked.model_copy(update={"seeds": (0,)})
    content = compared_here(asked, tmp_path)
    assert content.experiment.baseline == "scratch"
    assert wording.mark_text(content).endswith("scratch reaches in 4 steps (the best of 2 from scratch)")
    runs = {arm.label: arm.runs[-1] for arm in content.arms}
    two, plain = runs["two growths"], runs["as it is"]
    assert plain.flops == pytest.approx(plain.source_flops) and plain.start == plain.source
    assert two.start == pytest.approx(two.source, rel=1e-5)
    grown = json.loads((next(nodes.cells(asked)).source.folder(tmp_path / "cache") / nodes.DONE).read_text())
    assert plain.source_flops == grown["flops"] < two.source_flops
    old = {f.arm: f.old.mean for f in forgettings(content)}
    assert old["as it is"] == plain.final / plain.start - 1  # the same examples, before and after
    assert {h.arm for h in head_starts(content)} == {"two growths", "as it is"}
    rows = {row[0]: row for row in wording.head_start_table(content)}
    assert rows["two growths"][1:3] == ["wider", "4"]
    with pytest.raises(BadRecipe, match="is grown `from` none of the sources before it"):
        tiny(sources={"wider": second, "source": first})


def test_a_head_start_in_steps() -> None:
    """Scratch needs 200 steps for what the arm reaches in 50: 150 ahead; with a source of 50 steps half is saved."""

    def arm(label: str, method: str, points: list[tuple[int, float]], spent: float) -> ArmResult:
        runs = [pretend.ended(0, n, end, flops=10.0 * n, source_flops=spent) for n, end in points]
        return pretend.arm(label, method, runs)

    scratch, worse = (
        arm("scratch", "scratch", [(100, 2.0), (400, 1.0)], 0.0),
        arm("other", "scratch", [(400, 1.2)], 0.0),
    )
    grown = arm("grown", "lemon", [(50, 1.5)], 500.0)
    content = pretend.compared([scratch, worse, grown])
    [found] = head_starts(content)
    assert found.ahead.mean == 150.0 and found.net.mean == pytest.approx(0.5) and not found.bound
    grown.runs[0].final = 0.9
    [found] = head_starts(content)
    assert (found.ahead.mean, found.bound) == (350.0, "at least")


def test_the_quick_version_of_an_experiment_that_has_none(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="has no quick version: leave out --quick"):
        compare.compare(tiny(quick=None), tmp_path / "out", quick=True, cache=tmp_path / "cache", tell=pytest.fail)


def test_a_cache_has_one_place_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished run is known by where its source lies: from another folder it goes on too."""
    seen: list[Path] = []
    monkeypatch.setattr(compare, "run_all", lambda wanted, cache, **_: seen.append(cache))
    monkeypatch.setattr(
        compare, "result", lambda *_, **__: pretend.compared([pretend.arm("a", "b", [pretend.ended(0, 1, 1.0)])])
    )
    (tmp_path / "below").mkdir()
    for folder, name in ((tmp_path, "cache"), (tmp_path / "below", "../cache"), (tmp_path, tmp_path / "cache")):
        monkeypatch.chdir(folder)
        compare.compare(tiny(), tmp_path / f"out{len(seen)}", cache=Path(name))
    assert set(seen) == {tmp_path / "cache"}


def test_an_experiment_runs_and_runs_again_from_its_cache(tmp_path: Path) -> None:
    """Seven pieces on two processes; afterwards nothing is left to do, and the numbers are the runs' own."""
    asked, cache = tiny(), tmp_path / "cache"
    told = []
    content = compare.compare(asked, tmp_path / "out", quick=True, cache=cache, tell=told.append)
    assert [far.done for far in told] == list(range(1, told[-1].total + 1))
    assert content.as_json() == json.loads((tmp_path / "out" / "result.json").read_text())
    for cell in nodes.cells(asked.shortened()):
        done = json.loads((cell.trained.folder(cache) / nodes.DONE).read_text())
        arm = next(arm for arm in content.arms if arm.label == cell.arm)
        assert arm.runs[0].final == done["final"]["validation_loss"]
    lemon = next(arm for arm in content.arms if arm.label == "LEMON").runs[0]
    # Lossless: the target starts where the source ended, up to float32.
    assert lemon.start == pytest.approx(lemon.source, rel=1e-5)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("done.json")}
    run_all([cell.trained for cell in nodes.cells(asked.shortened())], cache, tell=pytest.fail)
    assert before == {path: path.stat().st_mtime_ns for path in cache.rglob("done.json")}
    # Killed in its first step, a run has but the record that it took along from beside its source.
    trained = next(cell.trained for cell in nodes.cells(asked.shortened()))
    shutil.copy(trained.after[0].folder(cache) / nodes.DONE, trained.folder(cache) / nodes.DONE)
    assert not trained.done(cache) and trained.after[0].done(cache)


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    """Among many runs, which one diverged? What was finished before stays."""
    hot = {"label": "hot", "train": {"learning_rate": 1e30}}
    asked = tiny(seeds=[0], arms=[{"label": "scratch", "method": "scratch"}, hot])
    with pytest.raises(LemonxError, match=r"^hot, 2 steps, seed 0: the loss is not finite"):
        compare.compare(asked, tmp_path / "out", cache=tmp_path / "cache", jobs=1)
    source = next(nodes.cells(asked)).source
    assert source.done(tmp_path / "cache") and not (tmp_path / "out").exists()


def test_a_run_that_the_system_kills(tmp_path: Path) -> None:
    def kill(_: object) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(Stopped, match=r"was killed, perhaps because memory ran out.*finished runs are kept"):
        compare.compare(tiny(seeds=[0]), tmp_path / "out", cache=tmp_path / "cache", jobs=1, tell=kill)
    assert next(nodes.cells(tiny())).source.done(tmp_path / "cache")
