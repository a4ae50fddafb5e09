"""Tables, GLUE's tasks, and their metrics, against hand-computed values and scikit-learn's and scipy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lemonx_lab.data
from lemonx_lab.data import Prepared
from lemonx_lab.data.metrics import Metrics
from lemonx_lab.data.sentences import TASKS
from lemonx_lab.data.vocabulary import BYTES

# A line of each official file: what is read from it, and what it looks like (header, or "" where there is none).
GLUE = {
    "cola": ("", "gj04\t{label}\t*\t{a}", ""),
    "sst-2": ("sentence\tlabel", "{a}\t{label}", ""),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{label}\t7\t8\t{a}\t{b}", ""),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t2\t3\t{a}\t{b}\t{label}", ""),
    "sts-b": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tnews\tf\t2012\t1\tnone\tnone\t{a}\t{b}\t{label}", "",
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\ts1b\ts2b\ts1p\ts2p\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\tp\tq\tg\t(x)\t(y)\t(z)\t(w)\t{a}\t{b}\tneutral\t{label}",
        # The validation file has five annotators' labels.
        "0\tp\tq\tg\t(x)\t(y)\t(z)\t(w)\t{a}\t{b}\tneutral\tneutral\tneutral\tneutral\tneutral\t{label}",
    ),
    "qnli": ("index\tquestion\tsentence\tlabel", "0\t{a}\t{b}\t{label}", ""),
    "rte": ("index\tsentence1\tsentence2\tlabel", "0\t{a}\t{b}\t{label}", ""),
    "wnli": ("index\tsentence1\tsentence2\tlabel", "0\t{a}\t{b}\t{label}", ""),
}  # fmt: skip


def prepare(config: dict | None = None, **data: Any) -> Prepared:
    return lemonx_lab.data.prepare("sequence-classification", data, config=config, seed=0)


def write_glue(folder: Path, name: str, labels: tuple[str, ...]) -> None:
    header, train, dev = GLUE[name]
    folder.mkdir(parents=True, exist_ok=True)
    # An unpaired quote and a typographic line separator are part of the text, not of the format.
    values = [
        {"a": f'"No, he said {number}.', "b": f"Second\u2028one {number}.", "label": label}
        for number, label in enumerate(labels * 2)
    ]
    for file, line in (("train.tsv", train), (TASKS[name].validation, dev or train)):
        rows = [header] * bool(header) + [line.format(**value) for value in values]
        (folder / file).write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", GLUE)
def test_glue_files_are_read_as_laid_out(tmp_path: Path, name: str):
    labels = TASKS[name].labels or ("0.0", "2.5", "5.0")
    write_glue(tmp_path, name, labels)
    prepared = prepare(kind="glue", name=name, path=tmp_path)
    pair = len(TASKS[name].text) == 2
    for examples in (prepared.train, prepared.validation):
        assert len(examples) == 2 * len(labels)
        for number, example in enumerate(examples):
            texts = (f'"No, he said {number}.', f"Second\u2028one {number}.")[: 1 + pair]
            expected = BYTES.encode_sentences(texts, 128)
            assert example["input_ids"].tolist() == expected["input_ids"]
            position = number % len(labels)
            assert example["labels"] == (position if TASKS[name].labels else float(labels[position]))
    if TASKS[name].labels:
        assert prepared.model["num_labels"] == len(labels)
        assert prepared.train[0]["labels"].dtype == torch.int64
    else:
        assert prepared.model["num_labels"] == 1 and prepared.model["problem_type"] == "regression"
        assert prepared.train[0]["labels"].dtype == torch.float32
    logits = np.eye(max(2, len(labels)))[[0, 1]] if TASKS[name].labels else np.array([[1.0], [2.0]])
    assert prepared.metrics is not None
    assert prepared.metrics(logits, np.array([0, 1])) == dict.fromkeys(TASKS[name].metrics, pytest.approx(1.0))


def test_glue_tasks_have_the_papers_metrics():
    metrics = {name: set(task.metrics) for name, task in TASKS.items()}
    assert metrics.pop("cola") == {"matthews"}
    assert metrics.pop("sts-b") == {"pearson", "spearman"}
    assert metrics.pop("mrpc") == metrics.pop("qqp") == {"accuracy", "f1"}
    assert all(names == {"accuracy"} for names in metrics.values())


def test_mnli_mismatched_and_broken_lines_of_qqp(tmp_path: Path):
    write_glue(tmp_path / "m", "mnli", TASKS["mnli"].labels)
    lines = (tmp_path / "m" / "dev_matched.tsv").read_text().split("\n")[:3]
    (tmp_path / "m" / "dev_mismatched.tsv").write_text("\n".join(lines))
    assert len(prepare(kind="glue", name="mnli", path=tmp_path / "m", mismatched=True).validation) == 2
    write_glue(tmp_path / "q", "qqp", ("0", "1"))
    with (tmp_path / "q" / "train.tsv").open("a") as file:
        file.write("1\t2\t3\tcut off\n")
    assert len(prepare(kind="glue", name="qqp", path=tmp_path / "q").train) == 4


def test_csv_with_quotes_and_named_columns(tmp_path: Path):
    rows = [f'"one, {number}\nand ""more""",word,{"yes" if number % 3 else "no"}' for number in range(60)]
    (tmp_path / "x.csv").write_text("first,second,answer\n" + "\n".join(rows))
    prepared = prepare(kind="table", path=tmp_path / "x.csv", text=["first", "second"], label="answer")
    total = {bytes(i for i in e["input_ids"].tolist() if i < 256): int(e["labels"]) for e in prepared.train}
    total |= {bytes(i for i in e["input_ids"].tolist() if i < 256): int(e["labels"]) for e in prepared.validation}
    expected = {f'one, {number}\nand "more"word'.encode(): int(number % 3 > 0) for number in range(60)}
    assert total == expected
    assert len(prepared.validation) > 0


def test_tsv_regression_with_the_usual_names(tmp_path: Path):
    (tmp_path / "x.tsv").write_text("text\tlabel\n" + "".join(f"some {number}\t{number / 2}\n" for number in range(50)))
    prepared = prepare(kind="table", path=tmp_path / "x.tsv", validation=tmp_path / "x.tsv", regression=True)
    assert [float(example["labels"]) for example in prepared.train] == [number / 2 for number in range(50)]
    assert prepared.model["problem_type"] == "regression"


def test_numeric_labels_keep_their_order(tmp_path: Path):
    (tmp_path / "x.csv").write_text("text,label\n" + "".join(f"t {number},{number % 11}\n" for number in range(55)))
    prepared = prepare(kind="table", path=tmp_path / "x.csv", validation=tmp_path / "x.csv")
    assert [int(example["labels"]) for example in prepared.train] == [number % 11 for number in range(55)]


# encoding and batches


@given(st.text(max_size=60), st.text(max_size=60), st.integers(8, 90))
@settings(max_examples=100, deadline=None)
def test_pairs_fit_and_the_longer_one_is_cut(a: str, b: str, length: int):
    encoded = BYTES.encode_sentences((a, b), length)
    ids, types = encoded["input_ids"], encoded["token_type_ids"]
    left, right = len(a.encode()), len(b.encode())
    assert len(ids) == len(types) == min(length, left + right + 3)
    kept = types.count(0) - 2, types.count(1) - 1
    assert bytes(ids[1 : 1 + kept[0]]) == a.encode()[: kept[0]]
    assert bytes(ids[2 + kept[0] : -1]) == b.encode()[: kept[1]]
    # A sentence that is cut is not shorter than the other one, but for the odd token.
    assert kept[0] == left or kept[0] >= kept[1]
    assert kept[1] == right or kept[1] >= kept[0] - 1


def test_batches_are_padded_to_the_longest(tmp_path: Path):
    (tmp_path / "x.csv").write_text("text,label\nab,0\nabcd,1\n")
    prepared = prepare(kind="table", path=tmp_path / "x.csv", validation=tmp_path / "x.csv")
    batch = prepared.collate(list(prepared.train))
    cls, sep, pad = BYTES.cls, BYTES.sep, BYTES.pad
    assert batch["input_ids"].tolist() == [[cls, 97, 98, sep, pad, pad], [cls, 97, 98, 99, 100, sep]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert batch["labels"].tolist() == [0, 1]


# metrics


def outputs(classes: list[int], count: int = 2) -> np.ndarray:
    return np.eye(count)[classes]


def test_metrics_by_hand():
    # 6 examples: 2 true positives, 1 false positive, 1 false negative, 2 true negatives.
    found, labels = [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]
    figures = Metrics(("accuracy", "f1", "matthews"))(outputs(found), labels)
    assert figures["accuracy"] == pytest.approx(4 / 6)
    assert figures["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert figures["matthews"] == pytest.approx((2 * 2 - 1 * 1) / (3 * 3 * 3 * 3) ** 0.5)
    # x = 1, 2, 3, 10, y = 1, 3, 2, 4: deviations (-3, -2, -1, 6) and (-1.5, 0.5, -0.5, 1.5).
    figures = Metrics(("pearson", "spearman"))(np.array([[1.0], [2.0], [3.0], [10.0]]), [1, 3, 2, 4])
    assert figures["pearson"] == pytest.approx((4.5 - 1 + 0.5 + 9) / (50 * 5) ** 0.5)
    assert figures["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=40))
@settings(max_examples=60, deadline=None)
def test_class_metrics_equal_scikit_learns(pairs: list[tuple[int, int]]):
    from sklearn import metrics

    found, labels = (list(side) for side in zip(*pairs, strict=True))
    figures = Metrics(("accuracy", "matthews"))(outputs(found, 4), labels)
    assert figures["accuracy"] == pytest.approx(metrics.accuracy_score(labels, found))
    assert figures["matthews"] == pytest.approx(metrics.matthews_corrcoef(labels, found), abs=1e-12)
    binary = [each % 2 for each in found], [each % 2 for each in labels]
    expected = metrics.f1_score(binary[1], binary[0], zero_division=0)
    assert Metrics(("f1",))(outputs(binary[0]), binary[1])["f1"] == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=3, max_size=40))
@settings(max_examples=60, deadline=None)
def test_correlations_equal_scipys(pairs: list[tuple[int, int]]):
    from scipy import stats

    found, labels = (np.array(side) / 4 for side in zip(*pairs, strict=True))
    figures = Metrics(("pearson", "spearman"))(found[:, None], labels)
    if np.ptp(found) == 0 or np.ptp(labels) == 0:
        assert figures == {"pearson": 0.0, "spearman": 0.0}
    else:
        assert figures["pearson"] == pytest.approx(stats.pearsonr(found, labels).statistic, abs=1e-12)
        assert figures["spearman"] == pytest.approx(stats.spearmanr(found, labels).statistic, abs=1e-12)
