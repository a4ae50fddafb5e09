"""Embedded data and what all data share: determinism, windows, masks, and whether data and model fit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import lemonx_lab.data
from lemonx.errors import BadData
from lemonx_lab.data import Prepared
from lemonx_lab.data.digits import ROTATION, SHIFT, affine, originals
from lemonx_lab.data.examples import Data, Examples, held_out, normals, uniforms
from lemonx_lab.data.kinds import KINDS, TASKS
from lemonx_lab.data.language import IGNORED, SUBSTITUTE, MaskedWindows, sources
from lemonx_lab.data.vocabulary import BYTES, Vocabulary

EMBEDDED = {
    "stdlib": "causal-lm",
    "digits": "image-classification",
    "docstrings": "sequence-classification",
}


def prepare(task: str, seed: int = 0, config: dict | None = None, **data: object) -> Prepared:
    return lemonx_lab.data.prepare(task, data, config=config, seed=seed)


def assert_same(a: Examples, b: Examples, indices: list[int]) -> None:
    for left, right in zip(a.__getitems__(indices), b.__getitems__(indices), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def differ(a: Examples, b: Examples, name: str) -> bool:
    return not torch.equal(a[3][name], b[3][name])


def test_every_kind_has_a_class_and_help():
    assert set(EMBEDDED) == {name for name, kind in KINDS.items() if kind.embedded}
    for kind in KINDS.values():
        assert set(kind.tasks) <= set(TASKS)
        assert issubclass(kind.data_class(), Data) and kind.data_class().model_config["extra"] == "forbid"
    assert list(lemonx_lab.data.describe()) == list(EMBEDDED)
    assert set(lemonx_lab.data.describe(embedded=False)) == set(KINDS) - set(EMBEDDED)


def test_help_imports_nothing_heavy():
    code = "import sys, lemonx_lab.data as d; d.describe(); print([m for m in sys.modules if m in ('torch', 'numpy')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", EMBEDDED)
def test_embedded_data_is_the_same_every_time(kind: str):
    first, second = (prepare(EMBEDDED[kind], kind=kind) for _ in range(2))
    assert first.digest == second.digest
    assert first.model == second.model
    for a, b in ((first.train, second.train), (first.validation, second.validation)):
        assert_same(a, b, [0, len(a) - 1, len(a) // 2])


@pytest.mark.parametrize(("task", "kind", "name"), [
    ("masked-lm", "stdlib", "input_ids"),
    ("image-classification", "digits", "pixel_values"),
])  # fmt: skip
def test_draws_depend_on_seed_epoch_and_index_alone(task: str, kind: str, name: str):
    run, again, other = prepare(task, 1, kind=kind), prepare(task, 1, kind=kind), prepare(task, 2, kind=kind)
    assert differ(run.train, other.train, name)
    assert_same(run.validation, other.validation, [0, 5, 9])
    one_by_one = [again.train[index] for index in (7, 3)]
    for left, right in zip(run.train.__getitems__([7, 3]), one_by_one, strict=True):
        assert torch.equal(left[name], right[name])
    run.train.set_epoch(1)
    run.validation.set_epoch(1)
    assert differ(run.train, again.train, name)
    assert_same(run.validation, again.validation, [0, 5, 9])
    again.train.set_epoch(1)
    assert_same(run.train, again.train, [3, 4])


def test_iteration_ends_and_negative_indices_count_from_the_end():
    validation = prepare("image-classification", kind="digits", validation_examples=5).validation
    assert len(list(validation)) == 5
    assert torch.equal(validation[-1]["pixel_values"], validation[4]["pixel_values"])
    with pytest.raises(IndexError):
        validation[5]


@given(st.integers(0, 2**62), st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_numbers_of_an_example_do_not_depend_on_its_company(index: int, count: int):
    rows = uniforms((1, 2, 3), [index, 0, index], count)
    assert np.array_equal(rows[0], rows[2])
    assert np.array_equal(rows[0], uniforms((1, 2, 3), [index], count + 1)[0, :count])
    assert not np.array_equal(rows[0], uniforms((1, 2, 4), [index], count)[0])
    assert (rows >= 0).all() and (rows < 1).all()


def test_uniforms_are_uniform_and_normals_normal():
    from scipy import stats

    values = uniforms((5,), range(200), 200)
    # Chance alone gives a p below 1e-4 once in 10,000 seeds, and this seed is fixed.
    assert stats.kstest(values.reshape(-1), "uniform").pvalue > 1e-4
    assert stats.kstest(values[:, 0], "uniform").pvalue > 1e-4
    assert stats.kstest(normals(values).reshape(-1), "norm").pvalue > 1e-4
    assert np.isfinite(normals(np.array([1 - 2.0**-53, 0.0, 0.0, 1 - 2.0**-53]))).all()  # the extremes of a uniform
    # Neighbouring rows and columns are uncorrelated: 5 deviations of a correlation of 40,000 pairs.
    for a, b in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        assert abs(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]) < 5 / a.size**0.5


# stdlib


def test_stdlib_is_ascii_source_without_tests():
    files = sources()
    assert {"ast.py", "json/decoder.py"} <= files.keys()
    assert not any(set(name.split("/")) & {"test", "tests", "idle_test", "site-packages"} for name in files)
    assert all(max(text, default=0) < 128 for text in files.values())
    total = sum(map(len, files.values()))
    assert total > 5e6
    share = sum(len(text) for name, text in files.items() if held_out(name)) / total
    assert 0.01 < share < 0.15


def test_stdlib_maps_each_other_byte_to_one_value(tmp_path: Path):
    (tmp_path / "a.py").write_bytes("x = 'é'\n".encode())
    assert sources(tmp_path) == {"a.py": b"x = '" + bytes([SUBSTITUTE]) * 2 + b"'\n"}


def test_stdlib_windows_are_its_bytes():
    prepared = prepare("causal-lm", kind="stdlib", length=32)
    train = b"".join(text for name, text in sources().items() if not held_out(name))
    for index in (0, 1, 12345, len(prepared.train) - 1):
        example = prepared.train[index]
        assert bytes(example["input_ids"].tolist()) == train[index * 32 : index * 32 + 32]
        assert torch.equal(example["labels"], example["input_ids"])
    assert len(prepared.train) == len(train) // 32
    assert len(prepared.validation) == 256
    assert prepared.model["vocab_size"] == BYTES.size > max(BYTES.special)


# masks


def windows(length: int, seed: int = 0) -> tuple[MaskedWindows, np.ndarray]:
    ids = (np.arange(3000) * 7919 % 256).astype(np.uint16)
    return MaskedWindows(ids, length, BYTES, seed), ids


@given(st.integers(8, 100), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_masking_keeps_its_promises(length: int, seed: int):
    examples, ids = windows(length, seed)
    inner = length - 2
    for index, example in enumerate(examples.__getitems__(range(min(10, len(examples))))):
        shown, labels = example["input_ids"].numpy(), example["labels"].numpy()
        original = np.array([BYTES.cls, *ids[index * inner : (index + 1) * inner], BYTES.sep])
        chosen = labels != IGNORED
        assert chosen.sum() == max(1, round(0.15 * inner))
        assert np.array_equal(labels[chosen], original[chosen])
        assert np.array_equal(shown[~chosen], original[~chosen])
        assert not chosen[0] and not chosen[-1]
        changed = shown[chosen & (shown != original)]
        assert ((changed == BYTES.mask) | (changed < 256)).all()


def test_shares_of_masked_random_and_kept():
    ids = np.full(200_000, 65, np.uint16)
    examples = MaskedWindows(ids, 102, BYTES, 0)
    batch = examples.__getitems__(range(len(examples)))
    shown = torch.cat([example["input_ids"][example["labels"] != IGNORED] for example in batch])
    count = len(shown)
    assert count == 15 * len(examples)
    # A random token is the original one in 1 of 256 cases.
    expected = {"mask": 0.8, "kept": 0.1 + 0.1 / 256}
    found = {"mask": (shown == BYTES.mask).double().mean(), "kept": (shown == 65).double().mean()}
    for name, share in expected.items():
        assert abs(float(found[name]) - share) < 5 * (share * (1 - share) / count) ** 0.5
    random = shown[(shown != BYTES.mask) & (shown != 65)]
    assert random.max() < 256 and len(random.unique()) == 255


def test_special_tokens_inside_a_window_are_never_chosen():
    ids = np.tile(np.array([BYTES.sep, 1, 2, 3], np.uint16), 500)
    examples = MaskedWindows(ids, 22, BYTES, 0)
    for example in examples.__getitems__(range(len(examples))):
        assert not set(example["labels"].tolist()) & BYTES.special
        assert (example["labels"] != IGNORED).sum() == round(0.15 * 15)


def test_one_ordinary_token_is_enough_for_a_loss():
    ids = np.tile(np.array([BYTES.sep] * 5 + [7], np.uint16), 50)
    examples = MaskedWindows(ids, 8, BYTES, 0)
    assert all(example["labels"].tolist().count(7) == 1 for example in examples)


def test_a_vocabulary_without_a_mask_is_refused():
    with pytest.raises(BadData, match="mask"):
        MaskedWindows(np.zeros(100, np.uint16), 10, Vocabulary(5), 0)


# digits


def test_digits_are_those_of_scikit_learn_and_validated_on_others():
    from sklearn.datasets import load_digits

    train, validation = originals()
    assert len(train.labels) + len(validation.labels) == 1797
    images = np.concatenate([train.images, validation.images]).reshape(1797, 64) * 16
    expected = load_digits().data
    assert np.array_equal(images[np.lexsort(images.T)], expected[np.lexsort(expected.T)])
    assert set(validation.labels.tolist()) == set(range(10))


def test_distortion_is_the_affine_map_it_says():
    middle = torch.full((1, 6), 0.5)  # no rotation, shift, shear; scale 1
    matrix = affine(middle)[0]
    assert torch.allclose(matrix, torch.tensor([[1, 0, 0], [0, 1, 0]]) / 0.75, atol=1e-6)
    turned = middle.clone()
    turned[0, 0] = 1.0
    matrix = affine(turned)[0, :, :2] * 0.75
    assert torch.allclose(matrix @ matrix.T, torch.eye(2), atol=1e-6)
    assert float(torch.atan2(matrix[1, 0], matrix[0, 0])) == pytest.approx(ROTATION, abs=1e-6)
    moved = middle.clone()
    moved[0, 1] = 1.0  # to the right: the centre of the original is there
    matrix = affine(moved)[0]
    assert torch.allclose(matrix @ torch.tensor([2 * SHIFT / 16, 0, 1]), torch.zeros(2), atol=1e-6)


def test_digits_stay_recognisable_and_do_not_saturate():
    """The nearest of 8,000 distorted digits has the same label in most cases, and 8x8's 98 % are out of reach."""
    prepared = prepare("image-classification", kind="digits")
    train = DataLoader(prepared.train, batch_size=8000, collate_fn=prepared.collate)
    held = DataLoader(prepared.validation, batch_size=1024, collate_fn=prepared.collate)
    batch, test = next(iter(train)), next(iter(held))
    assert batch["pixel_values"].shape == (8000, 1, 16, 16) and batch["pixel_values"].dtype == torch.float32
    nearest = torch.cdist(test["pixel_values"].flatten(1), batch["pixel_values"].flatten(1)).argmin(1)
    outputs = torch.nn.functional.one_hot(batch["labels"][nearest], 10)
    assert prepared.metrics is not None
    assert 0.8 < prepared.metrics(outputs.numpy(), test["labels"].numpy())["accuracy"] < 0.96


@pytest.mark.parametrize(("task", "kind"), [
    ("causal-lm", "stdlib"), ("masked-lm", "stdlib"), ("image-classification", "digits")
])  # fmt: skip
def test_a_batch_of_64_costs_little(task: str, kind: str):
    prepared = prepare(task, kind=kind)
    indices = list(range(64))
    prepared.collate(prepared.train.__getitems__(indices))
    costs = []
    for _ in range(20):
        start = time.thread_time()
        prepared.collate(prepared.train.__getitems__(indices))
        costs.append(time.thread_time() - start)
    assert min(costs) < 5e-3


# docstrings


@pytest.mark.parametrize("question", ["subject", "order", "adjacent"])
def test_docstring_questions_are_balanced_and_disjoint(question: str):
    prepared = prepare("sequence-classification", kind="docstrings", question=question, length=512)
    texts = []
    for examples in (prepared.train, prepared.validation):
        labels = torch.stack([example["labels"] for example in examples])
        assert abs(labels.double().mean() - 0.5) < 0.05
        texts.append({bytes(i for i in example["input_ids"].tolist() if i < 256) for example in examples})
    assert len(prepared.train) > 1000 and len(prepared.validation) > 100
    assert not texts[0] & texts[1]


def test_subjects_are_those_that_python_sees():
    """Against the parser, on part of the library: what a docstring belongs to, and what it says first."""
    import ast

    from lemonx_lab.data.docstrings import subject

    names = ("argparse.py", "threading.py", "email/message.py", "logging/__init__.py")
    expected = set()
    for name in names:
        for node in ast.walk(ast.parse(sources()[name])):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                expected.add((text, int(not isinstance(node, ast.ClassDef))))
    rows = [(sentence, label) for module, (sentence,), label in subject() if module in names]
    assert len(rows) > 50
    for sentence, label in rows:
        assert any(text.startswith(sentence) and label == kind for text, kind in expected)


def test_order_swaps_two_words_of_a_real_sentence():
    from lemonx_lab.data.docstrings import order, paragraphs

    real = {sentence for parts in paragraphs().values() for part in parts for sentence in part}
    by_words = {tuple(sorted(sentence[:-1].split(" "))) for sentence in real}
    for _, (text,), label in order():
        words = text[:-1].split(" ")
        assert tuple(sorted(words)) in by_words
        if label:
            assert text in real
    swapped = [text for _, (text,), label in order() if not label]
    # A sentence can turn into another real one; hardly ever.
    assert sum(text in real for text in swapped) < 0.01 * len(swapped)


def test_adjacent_sentences_are_adjacent():
    from lemonx_lab.data.docstrings import adjacent, paragraphs

    joined = "\n".join(" ".join(part) for parts in paragraphs().values() for part in parts)
    rows = adjacent()
    follow = [" ".join(pair) in joined for _, pair, _ in rows]
    assert all(found for found, (_, _, label) in zip(follow, rows, strict=True) if label)
    assert sum(found for found, (_, _, label) in zip(follow, rows, strict=True) if not label) < 0.01 * len(rows)


# options, and whether data and model fit


@pytest.mark.parametrize(("task", "data", "match"), [
    ("causal-lm", {}, "no kind: choose stdlib, text"),
    ("causal-lm", {"kind": "nothing"}, "'nothing': choose stdlib"),
    ("causal-lm", {"kind": "digits"}, "is for image-classification, not for causal-lm: choose stdlib"),
    ("causal-lm", {"kind": "stdlib", "lenght": 3}, "'stdlib': 'lenght' is not a key of .*: did you mean 'length'"),
    ("causal-lm", {"kind": "stdlib", "length": "long"}, "'stdlib': length: .*integer"),
    ("causal-lm", {"kind": "stdlib", "length": 0}, "'stdlib': length: .*greater"),
    ("causal-lm", {"kind": "text"}, "'text': 'path' is missing: add it"),
    ("causal-lm", "stdlib", "write data: {kind: stdlib}"),
    ("speech", {"kind": "stdlib"}, "no task 'speech': choose causal-lm"),
    ("sequence-classification", {"kind": "glue", "name": "sst2", "path": "x"}, "'glue': name: .*'sst-2'"),
])  # fmt: skip
def test_wrong_options_are_one_line(task: str, data: dict, match: str):
    with pytest.raises(BadData, match=match) as caught:
        lemonx_lab.data.prepare(task, data, config=None, seed=0)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


STDLIB, DIGITS = {"kind": "stdlib", "length": 64}, {"kind": "digits"}
VISION = {"image_size": 16, "num_channels": 1, "architectures": ["ViTForImageClassification"]}


@pytest.mark.parametrize(("task", "data", "config", "match"), [
    ("causal-lm", STDLIB, {"vocab_size": 128}, "vocabulary of 128, but the data needs 260"),
    ("causal-lm", STDLIB, {"vocab_size": 260, "n_positions": 32}, "32 positions .*set length to 32 or less"),
    ("masked-lm", STDLIB, {"vocab_size": 260, "max_position_embeddings": 32}, "32 positions"),
    ("image-classification", DIGITS, {"image_size": 32}, "image_size = 32, but the data has 16"),
    ("image-classification", DIGITS, {"image_size": [16, 8]}, r"image_size = \[16, 8\], but the data has 16"),
    ("image-classification", DIGITS, {"num_channels": 3}, "num_channels = 3, but the data has 1"),
    ("image-classification", DIGITS, {**VISION, "id2label": {"0": "a"}}, "1 labels, but the data has 10"),
    ("image-classification", DIGITS, VISION, "2 labels, but the data has 10"),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_refused(task: str, data: dict, config: dict, match: str):
    with pytest.raises(BadData, match=match):
        lemonx_lab.data.prepare(task, data, config=config, seed=0)


def test_a_model_that_fits_is_not_refused():
    ten = {"id2label": {str(k): str(k) for k in range(10)}}
    lemonx_lab.data.prepare("image-classification", DIGITS, config={**VISION, **ten}, seed=0)
    lemonx_lab.data.prepare("image-classification", DIGITS, config={**VISION, "image_size": [16, 16], **ten}, seed=0)
    lemonx_lab.data.prepare("causal-lm", STDLIB, config={"vocab_size": 512, "max_position_embeddings": 64}, seed=0)
    # No classifier yet, so its labels are not decided.
    encoder = {"vocab_size": 260, "architectures": ["BertForMaskedLM"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    lemonx_lab.data.prepare("sequence-classification", {"kind": "docstrings"}, config=encoder, seed=0)


def test_token_types_are_for_models_that_have_them():
    def names(config: dict | None) -> set[str]:
        data = {"kind": "docstrings", "question": "adjacent"}
        return set(lemonx_lab.data.prepare("sequence-classification", data, config=config, seed=0).train[0])

    assert names({"vocab_size": 260, "type_vocab_size": 2}) == {"input_ids", "token_type_ids", "labels"}
    assert names({"vocab_size": 260}) == names(None) == {"input_ids", "labels"}


@pytest.mark.parametrize(("kind", "task", "package"), [
    ("digits", "image-classification", "sklearn.datasets"),
    ("hf", "causal-lm", "datasets"),
    ("images", "image-classification", "PIL"),
])  # fmt: skip
def test_a_missing_package_says_what_to_install(kind: str, task: str, package: str, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    originals.cache_clear()
    data = {"kind": kind} | ({} if kind == "digits" else {"path": tmp_path})
    with pytest.raises(BadData, match=r"pip install lemonx\[lab\]"):
        lemonx_lab.data.prepare(task, data, config=None, seed=0)
