"""Broken, missing and unsuitable data: each is one line that names the file and says what to do."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lemonx_lab.data
from lemonx.errors import BadData

Break = Callable[[Path], dict[str, Any]]
CASES: list[tuple[str, str, Break, str]] = []


def case(task: str, match: str) -> Callable[[Break], Break]:
    """Registers a function that writes broken data into a folder and returns the data section for it."""

    def register(make: Break) -> Break:
        CASES.append((make.__name__, task, make, match))
        return make

    return register


LM, IMAGES, SEQUENCES = "causal-lm", "image-classification", "sequence-classification"


# text and tokens


@case(LM, r"nothing\.txt' does not exist: check the path")
def missing_text(folder: Path) -> dict[str, Any]:
    return {"kind": "text", "path": folder / "nothing.txt"}


@case(LM, "has no file that matches '\\*': check path and pattern")
def empty_folder(folder: Path) -> dict[str, Any]:
    (folder / "corpus").mkdir()
    return {"kind": "text", "path": folder / "corpus"}


@case(LM, r"empty\.txt' has 0 tokens for training, less than one window of 128")
def empty_text(folder: Path) -> dict[str, Any]:
    (folder / "empty.txt").write_text("")
    return {"kind": "text", "path": folder / "empty.txt"}


@case(LM, r"short\.txt' has 51 tokens for validation, less than one window of 128: give more text")
def short_text(folder: Path) -> dict[str, Any]:
    (folder / "short.txt").write_text("x" * 1000)
    return {"kind": "text", "path": folder / "short.txt"}


@case(LM, r"latin\.txt' \(.*can't decode byte 0xe9 in position 3.*: convert it")
def latin_text(folder: Path) -> dict[str, Any]:
    (folder / "latin.txt").write_bytes("café".encode("latin-1") * 500)
    return {"kind": "text", "path": folder / "latin.txt"}


@case(LM, r"vocab\.txt.*: set tokenizer: bytes")
def folder_without_tokenizer(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("x" * 5000)
    return {"kind": "text", "path": folder / "a.txt", "tokenizer": folder}


@case(LM, "transformers cannot read the tokenizer in .*: save it again")
def broken_tokenizer(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("x" * 5000)
    (folder / "tokenizer.json").write_text('{"version": ')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return {"kind": "text", "path": folder / "a.txt", "tokenizer": folder}


@case(LM, r"cannot read .*x\.npy' \(.*\): write it with numpy\.save")
def text_as_tokens(folder: Path) -> dict[str, Any]:
    (folder / "x.npy").write_text("1 2 3")
    return {"kind": "tokens", "path": folder / "x.npy"}


@case(LM, r"cannot read .*x\.npy' \(.*\): write it with numpy\.save")
def truncated_tokens(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.arange(5000))
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:1000])
    return {"kind": "tokens", "path": folder / "x.npy"}


@case(LM, r"cannot read .*x\.npy' \(.*\): write it with numpy\.save")
def tokens_with_a_header_that_does_not_end(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.arange(500))
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes().replace(b"}", b"(", 1))
    return {"kind": "tokens", "path": folder / "x.npy"}


@case(LM, r"x\.npy' holds float64 of shape \(500,\): give token ids as integers")
def real_tokens(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.ones(500))
    return {"kind": "tokens", "path": folder / "x.npy"}


@case(LM, r"cannot read .*x\.npy' \(.*\): write it with numpy\.save")
def pickled_tokens(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    return {"kind": "tokens", "path": folder / "x.npy"}


@case(LM, r"negative token id -1")
def negative_tokens(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.arange(-1, 5000))
    return {"kind": "tokens", "path": folder / "x.npy"}


@case(LM, r"needs a vocabulary of 5000, but vocab_size is 100")
def large_tokens(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.arange(5000))
    return {"kind": "tokens", "path": folder / "x.npy", "vocab_size": 100}


@case("masked-lm", "no mask token")
def tokens_without_mask(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.arange(5000))
    return {"kind": "tokens", "path": folder / "x.npy"}


# images


def save_images(root: Path, *classes: str) -> None:
    from PIL import Image

    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(40):
            Image.new("RGB", (4, 4)).save(root / name / f"{number}.png")


@case(IMAGES, "images' does not exist: check the path")
def missing_images(folder: Path) -> dict[str, Any]:
    return {"kind": "images", "path": folder / "images"}


@case(IMAGES, "has training examples of 0 classes: give examples of at least 2")
def no_images(folder: Path) -> dict[str, Any]:
    return {"kind": "images", "path": folder}


@case(IMAGES, "has training examples of 1 class: give examples of at least 2")
def one_class(folder: Path) -> dict[str, Any]:
    save_images(folder, "cat")
    return {"kind": "images", "path": folder}


@case(IMAGES, r"dog' has no image \(.*\.jpg.*\): add some, or remove the folder")
def empty_class(folder: Path) -> dict[str, Any]:
    save_images(folder, "cat")
    (folder / "dog").mkdir()
    return {"kind": "images", "path": folder}


@case(IMAGES, r"cannot read .*0\.png' \(.*\): remove it")
def broken_image(folder: Path) -> dict[str, Any]:
    save_images(folder, "cat", "dog")
    file = folder / "cat" / "0.png"
    file.write_bytes(file.read_bytes()[:40])
    return {"kind": "images", "path": folder}


@case(IMAGES, "has the validation label 'fox', which is none of cat, dog")
def unknown_class(folder: Path) -> dict[str, Any]:
    save_images(folder / "train", "cat", "dog")
    save_images(folder / "val", "cat", "dog", "fox")
    return {"kind": "images", "path": folder}


@case(IMAGES, "mean has 2 values for images of 3 channels")
def two_means(folder: Path) -> dict[str, Any]:
    save_images(folder, "cat", "dog")
    return {"kind": "images", "path": folder, "mean": [0.5, 0.5]}


# IDX

HEAD_IMAGES, HEAD_LABELS = struct.pack(">HBBIII", 0, 8, 3, 6, 2, 2), struct.pack(">HBBI", 0, 8, 1, 6)
GOOD = {
    "train-images-idx3-ubyte": HEAD_IMAGES + bytes(24),
    "train-labels-idx1-ubyte": HEAD_LABELS + bytes([0, 1, 0, 1, 0, 1]),
    "t10k-images-idx3-ubyte": HEAD_IMAGES + bytes(24),
    "t10k-labels-idx1-ubyte": HEAD_LABELS + bytes([0, 1, 0, 1, 0, 1]),
}
FIRST = "train-images-idx3-ubyte"


def idx(folder: Path, **changed: bytes | None) -> dict[str, Any]:
    """A folder of IDX files, with some of them other than they should be."""
    for name, data in {**GOOD, **{key.replace("_", "-"): data for key, data in changed.items()}}.items():
        if data is not None:
            (folder / name).write_bytes(data)
    return {"kind": "idx", "path": folder}


def test_the_idx_files_are_good_before_they_are_broken(tmp_path: Path):
    assert len(lemonx_lab.data.prepare(IMAGES, idx(tmp_path), config=None, seed=0).train) == 6


@case(IMAGES, r"has no t10k-labels-idx1-ubyte \(or t10k-labels-idx1-ubyte\.gz\)")
def missing_idx(folder: Path) -> dict[str, Any]:
    return idx(folder, t10k_labels_idx1_ubyte=None)


@case(
    IMAGES,
    r"train-images-idx3-ubyte' has 39 bytes, but its header promises 40 \(shape \(6, 2, 2\)\): download it again",
)
def truncated_idx(folder: Path) -> dict[str, Any]:
    return idx(folder, train_images_idx3_ubyte=GOOD[FIRST][:-1])


@case(IMAGES, "has 41 bytes, but its header promises 40")
def trailing_idx(folder: Path) -> dict[str, Any]:
    return idx(folder, train_images_idx3_ubyte=GOOD[FIRST] + b"x")


@case(IMAGES, "has 10 bytes, but its header promises")
def idx_without_its_shape(folder: Path) -> dict[str, Any]:
    return idx(folder, train_images_idx3_ubyte=GOOD[FIRST][:10])


@case(IMAGES, f"has 40 bytes, but its header promises {16 + (2**32 - 1) ** 3} ")
def idx_of_astronomic_size(folder: Path) -> dict[str, Any]:
    return idx(folder, train_images_idx3_ubyte=struct.pack(">HBBIII", 0, 8, 3, *[2**32 - 1] * 3) + bytes(24))


@case(IMAGES, r"is not an IDX file \(it starts with 3c68746d\): download it again")
def page_instead_of_idx(folder: Path) -> dict[str, Any]:
    return idx(folder, train_images_idx3_ubyte=b"<html><body>404</body></html>")


@case(IMAGES, r"is not an IDX file \(it starts with nothing\)")
def empty_idx(folder: Path) -> dict[str, Any]:
    return idx(folder, train_images_idx3_ubyte=b"")


@case(IMAGES, r"cannot read .*ubyte' \(.*\): download it again")
def truncated_gzip(folder: Path) -> dict[str, Any]:
    return idx(folder, train_images_idx3_ubyte=gzip.compress(GOOD[FIRST])[:-9])


@case(IMAGES, r"has images of uint8 and shape \(6,\): give images in three dimensions")
def labels_instead_of_images(folder: Path) -> dict[str, Any]:
    return idx(folder, train_images_idx3_ubyte=GOOD["train-labels-idx1-ubyte"])


@case(IMAGES, r"images of shape \(6, 2, 2\) and labels of uint8 and shape \(5,\): give .*one integer per image")
def too_few_labels(folder: Path) -> dict[str, Any]:
    return idx(folder, train_labels_idx1_ubyte=struct.pack(">HBBI", 0, 8, 1, 5) + bytes([0, 1, 0, 1, 0]))


@case(IMAGES, "has the validation label 7, which is none of 0, 1")
def idx_label_out_of_range(folder: Path) -> dict[str, Any]:
    return idx(folder, t10k_labels_idx1_ubyte=HEAD_LABELS + bytes([0, 1, 0, 1, 0, 7]))


@case(IMAGES, "has training examples of 1 class:")
def idx_of_one_class(folder: Path) -> dict[str, Any]:
    return idx(folder, train_labels_idx1_ubyte=HEAD_LABELS + bytes(6))


# npz


def npz(folder: Path, **changed: Any) -> dict[str, Any]:
    """An npz file of 200 images, with some arrays other than they should be."""
    good = {"images": np.zeros((200, 4, 4), np.uint8), "labels": np.arange(200) % 2}
    np.savez(folder / "x.npz", **{name: array for name, array in {**good, **changed}.items() if array is not None})
    return {"kind": "npz", "path": folder / "x.npz"}


def test_the_npz_file_is_good_before_it_is_broken(tmp_path: Path):
    assert len(lemonx_lab.data.prepare(IMAGES, npz(tmp_path), config=None, seed=0).train) > 150


@case(IMAGES, r"cannot read .*x\.npz' \(Object arrays cannot be loaded .*\): write it with numpy\.savez")
def pickled_npz(folder: Path) -> dict[str, Any]:
    return npz(folder, labels=np.array([{"a": 1}] * 200, object))


@case(IMAGES, "holds the arrays images, targets: name them x_train, y_train, x_test, y_test, or images, labels")
def npz_of_other_names(folder: Path) -> dict[str, Any]:
    return npz(folder, labels=None, targets=np.arange(200))


@case(IMAGES, "has images of int64: give uint8, or floats")
def npz_of_integers(folder: Path) -> dict[str, Any]:
    return npz(folder, images=np.zeros((200, 4, 4), np.int64))


@case(IMAGES, r"images with values from 0\.0 to 255\.0: give uint8, or floats in \[0, 1\]")
def npz_of_large_floats(folder: Path) -> dict[str, Any]:
    return npz(folder, images=np.linspace(0, 255, 200 * 16).reshape(200, 4, 4))


@case(IMAGES, "images with values from nan to nan")
def npz_with_nan(folder: Path) -> dict[str, Any]:
    return npz(folder, images=np.full((200, 4, 4), np.nan, np.float32))


@case(IMAGES, r"images of uint8 and shape \(\d+, 16\): give")
def flat_npz(folder: Path) -> dict[str, Any]:
    return npz(folder, images=np.zeros((200, 16), np.uint8))


@case(IMAGES, r"labels of float64 and shape .*: give .*one integer per image")
def npz_of_real_labels(folder: Path) -> dict[str, Any]:
    return npz(folder, labels=np.linspace(0, 1, 200))


@case(IMAGES, "has the label -1: number the classes from 0")
def npz_of_negative_labels(folder: Path) -> dict[str, Any]:
    return npz(folder, labels=np.arange(200) % 2 - 1)


@case(IMAGES, r"has images of shape \(200, 4, 4\) and labels of shape \(100,\)")
def npz_of_few_labels(folder: Path) -> dict[str, Any]:
    return npz(folder, labels=np.arange(100) % 2)


@case(IMAGES, r"cannot read .*x\.npz' \(.*\): write it with numpy\.savez")
def truncated_npz(folder: Path) -> dict[str, Any]:
    data = npz(folder)
    data["path"].write_bytes(data["path"].read_bytes()[:-100])
    return data


@case(IMAGES, r"cannot read .*x\.npz' \(.*\): write it with numpy\.savez")
def npz_with_a_broken_member(folder: Path) -> dict[str, Any]:
    data = npz(folder)
    member = io.BytesIO()
    np.save(member, np.zeros((200, 4, 4), np.uint8))
    with zipfile.ZipFile(data["path"], "w") as archive:
        archive.writestr("images.npy", member.getvalue()[:-7])
        archive.writestr("labels.npy", member.getvalue())
    return data


@case(IMAGES, r"cannot read .*x\.npz' \(it holds one array, without a name\): write it with numpy\.savez")
def npy_as_npz(folder: Path) -> dict[str, Any]:
    with (folder / "x.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    return {"kind": "npz", "path": folder / "x.npz"}


# tables


def table(folder: Path, content: str | bytes, name: str = "x.csv", **options: Any) -> dict[str, Any]:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return {"kind": "table", "path": folder / name, **options}


ROWS = "".join(f"text {number},{number % 2}\n" for number in range(60))


def test_the_table_is_good_before_it_is_broken(tmp_path: Path):
    assert (
        len(lemonx_lab.data.prepare(SEQUENCES, table(tmp_path, "text,label\n" + ROWS), config=None, seed=0).train) > 40
    )


@case(SEQUENCES, r"x\.csv' has no column 'label', only text, target: name others in text and label")
def no_label_column(folder: Path) -> dict[str, Any]:
    return table(folder, "text,target\n" + ROWS)


@case(SEQUENCES, r"x\.csv' has no column 'body', only text, label")
def no_named_column(folder: Path) -> dict[str, Any]:
    return table(folder, "text,label\n" + ROWS, text="body")


@case(SEQUENCES, r"x\.csv' has the columns phrase, label: name those with the sentences in text")
def no_text_column(folder: Path) -> dict[str, Any]:
    return table(folder, "phrase,label\n" + ROWS)


@case(SEQUENCES, r"x\.csv' has 3 columns in line 62, but 2 in its header")
def ragged_table(folder: Path) -> dict[str, Any]:
    return table(folder, "text,label\n" + ROWS + "a, b,1\n")


@case(SEQUENCES, r"x\.csv' cannot be read in line \d+ \(unexpected end of data\): correct the line")
def unclosed_quote(folder: Path) -> dict[str, Any]:
    return table(folder, "text,label\n" + ROWS + '"never closed,1\n')


@case(SEQUENCES, r"x\.csv' is empty: give a table with a header")
def empty_table(folder: Path) -> dict[str, Any]:
    return table(folder, "")


@case(SEQUENCES, "has training examples of 0 classes:")
def only_a_header(folder: Path) -> dict[str, Any]:
    return table(folder, "text,label\n")


@case(SEQUENCES, "has training examples of 1 class:")
def table_of_one_class(folder: Path) -> dict[str, Any]:
    return table(folder, "text,label\n" + ROWS.replace(",1\n", ",0\n"))


@case(SEQUENCES, r"x\.csv' \(.*can't decode byte 0xff in position 11")
def table_of_bytes(folder: Path) -> dict[str, Any]:
    return table(folder, b"text,label\n\xff,1\n")


@case(SEQUENCES, r"x\.parquet' is neither \.csv nor \.tsv")
def other_table(folder: Path) -> dict[str, Any]:
    return table(folder, "text,label\n" + ROWS, "x.parquet")


@case(SEQUENCES, "has the validation label 'perhaps', which is none of 0, 1: correct it")
def unknown_label(folder: Path) -> dict[str, Any]:
    (folder / "held.csv").write_text("text,label\nhm,perhaps\n")
    return table(folder, "text,label\n" + ROWS, validation=folder / "held.csv")


@case(SEQUENCES, r"x\.csv' \(.*'good'\): give a number for each example, or remove regression: true")
def names_for_regression(folder: Path) -> dict[str, Any]:
    return table(folder, "text,label\n" + ROWS.replace(",1\n", ",good\n"), regression=True)


@case(SEQUENCES, "has a label that is not finite: remove that example")
def infinite_label(folder: Path) -> dict[str, Any]:
    return table(folder, "text,label\n" + ROWS.replace(",1\n", ",inf\n"), regression=True)


@case(SEQUENCES, r"train\.tsv' does not exist")
def missing_glue(folder: Path) -> dict[str, Any]:
    return {"kind": "glue", "name": "rte", "path": folder}


@case(SEQUENCES, r"train\.tsv' has 3 columns in line 2, where 4 are needed: download the official file")
def ragged_glue(folder: Path) -> dict[str, Any]:
    (folder / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\n")
    return {"kind": "glue", "name": "rte", "path": folder}


@case(SEQUENCES, "has the training label 'maybe', which is none of entailment, not_entailment")
def unknown_glue_label(folder: Path) -> dict[str, Any]:
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n1\ta\tb\tmaybe\n")
    return {"kind": "glue", "name": "rte", "path": folder}


# datasets on disk


def saved(folder: Path, **splits: dict[str, list[Any]]) -> dict[str, Any]:
    from datasets import Dataset, DatasetDict

    DatasetDict({name: Dataset.from_dict(rows) for name, rows in splits.items()}).save_to_disk(str(folder / "d"))
    return {"kind": "hf", "path": folder / "d"}


@case(LM, "^datasets cannot read .*: write it by save_to_disk")
def no_dataset(folder: Path) -> dict[str, Any]:
    return {"kind": "hf", "path": folder}


@case(LM, "^datasets cannot read ")
def broken_dataset(folder: Path) -> dict[str, Any]:
    data = saved(folder, train={"text": ["abc"] * 100})
    file = next((folder / "d").rglob("*.arrow"))
    file.write_bytes(file.read_bytes()[:20])
    return data


@case(LM, "has no split 'train', only test: name others in train and validation")
def no_train_split(folder: Path) -> dict[str, Any]:
    return saved(folder, test={"text": ["abc"] * 100})


@case(LM, "has no split 'held', only train: name others in train and validation")
def no_validation_split(folder: Path) -> dict[str, Any]:
    return {**saved(folder, train={"text": ["abc"] * 100}), "validation": "held"}


@case(LM, "has the columns body: name those with the sentences in text")
def no_dataset_column(folder: Path) -> dict[str, Any]:
    return saved(folder, train={"body": ["abc"] * 100})


@case(SEQUENCES, "has the label -1: number the classes from 0")
def hidden_labels(folder: Path) -> dict[str, Any]:
    return saved(folder, train={"text": ["abc"] * 100, "label": [0, -1] * 50})


@case(SEQUENCES, "has real numbers as labels: set regression: true")
def real_labels(folder: Path) -> dict[str, Any]:
    return saved(folder, train={"text": ["abc"] * 100, "label": [0.5, 1.0] * 50})


@case(SEQUENCES, "has rows without a label: remove such rows")
def labels_with_holes(folder: Path) -> dict[str, Any]:
    return saved(folder, train={"text": ["abc"] * 100, "label": [0, None] * 50})


@case(IMAGES, "holds no images in its column 'image': cast it to datasets.Image")
def no_image_column(folder: Path) -> dict[str, Any]:
    return saved(folder, train={"image": ["abc"] * 100, "label": [0, 1] * 50})


@pytest.mark.parametrize(("task", "make", "match"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])
def test_broken_data_is_one_line(tmp_path: Path, task: str, make: Break, match: str):
    data = make(tmp_path)
    with pytest.raises(BadData, match=match) as caught:
        lemonx_lab.data.prepare(task, data, config=None, seed=0)
    assert "\n" not in str(caught.value)
    if "path" in data and "values" not in match and "tokenizer" not in match and "mask" not in match:
        assert str(tmp_path) in str(caught.value)


def test_bytes_that_are_not_utf8_can_be_replaced(tmp_path: Path):
    data = {**latin_text(tmp_path), "errors": "replace", "length": 16}
    prepared = lemonx_lab.data.prepare(LM, data, config=None, seed=0)
    assert bytes(prepared.train[0]["input_ids"].tolist()[:6]) == "caf\ufffd".encode()


def test_bytes_are_not_fed_to_a_model_of_words(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 5000)
    data = {"kind": "text", "path": tmp_path / "a.txt"}
    with pytest.raises(
        BadData, match="vocabulary of 30522 and no tokenizer in its folder, and bytes need 260: set tokenizer"
    ):
        lemonx_lab.data.prepare(LM, data, config={"vocab_size": 30522}, seed=0, folder=tmp_path)
    lemonx_lab.data.prepare(LM, {**data, "tokenizer": "bytes"}, config={"vocab_size": 30522}, seed=0)


def test_an_image_that_breaks_later_names_itself(tmp_path: Path):
    save_images(tmp_path, "cat", "dog")
    prepared = lemonx_lab.data.prepare(
        IMAGES, {"kind": "images", "path": tmp_path, "image_size": 4}, config=None, seed=0
    )
    for file in (tmp_path / "dog").iterdir():
        file.write_bytes(b"no longer")
    with pytest.raises(BadData, match=r"cannot read .*dog/.*\.png' \(.*\): remove it"):
        list(prepared.train)
