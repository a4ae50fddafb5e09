"""Data from the user's files: what is read is what was written."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lemonx_lab.data
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import held_out
from lemonx_lab.data.pictures import read_idx
from lemonx_lab.data.vocabulary import BYTES

NOISE = np.random.default_rng(0)


def prepare(task: str, config: dict | None = None, folder: Path | None = None, **data: Any) -> Prepared:
    return lemonx_lab.data.prepare(task, data, config=config, seed=0, folder=folder)


def ids(prepared: Prepared, side: str = "train") -> list[int]:
    return [token for example in getattr(prepared, side) for token in example["input_ids"].tolist()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: number for number, word in enumerate([*special, "the", "cat", "sat", "on", "mat"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)  # fmt: skip
    return folder


# text


def test_one_file_is_split_at_its_end(tmp_path: Path):
    text = "".join(f"line {number}: grüße\n" for number in range(500))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    prepared = prepare("causal-lm", kind="text", path=tmp_path / "a.txt", length=16)
    cut = round(len(text) * 0.95)
    sides = [part.encode() for part in (text[:cut], text[cut:])]
    for side, expected in zip(("train", "validation"), sides, strict=True):
        assert ids(prepared, side) == [*expected, BYTES.sep][: (len(expected) + 1) // 16 * 16]


def test_a_folder_is_split_by_paths(tmp_path: Path):
    names = [f"part{number % 3}/{number}.txt" for number in range(60)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}, and more. " * 3)
    (tmp_path / ".hidden.txt").write_text("hidden")
    prepared = prepare("causal-lm", kind="text", path=tmp_path, length=8)
    seen = [bytes(i for i in ids(prepared, side) if i < 256).decode() for side in ("train", "validation")]
    assert "hidden" not in "".join(seen)
    for name in names:
        inside = [f"this is {name}" in text for text in seen]
        assert inside == [not held_out(name), held_out(name)] or name == max(names)


def test_validation_path_pattern_and_digest(tmp_path: Path):
    (tmp_path / "a.txt").write_text("train " * 50)
    (tmp_path / "b.md").write_text("other " * 50)
    (tmp_path / "held").write_text("held " * 50)
    options = {"kind": "text", "path": tmp_path, "pattern": "*.txt", "validation": tmp_path / "held", "length": 10}
    prepared = lemonx_lab.data.prepare("causal-lm", options, config=None, seed=0)
    assert bytes(ids(prepared)) == b"train " * 50
    assert bytes(ids(prepared, "validation")) == b"held " * 50
    (tmp_path / "a.txt").write_text("Train " + "train " * 49)
    assert lemonx_lab.data.prepare("causal-lm", options, config=None, seed=0).digest != prepared.digest


def test_text_goes_through_the_checkpoints_tokenizer(tmp_path: Path, tokenizer: Path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 100)
    data = {"kind": "text", "path": tmp_path / "a.txt", "length": 8}
    prepared = prepare("causal-lm", {"vocab_size": 10}, tokenizer, **data)
    assert ids(prepared)[:6] == [5, 6, 7, 8, 5, 9]
    assert prepared.model["vocab_size"] == 10
    masked = prepare("masked-lm", {"vocab_size": 10}, tokenizer, **data).train[0]
    assert masked["input_ids"][0] == 2 and masked["input_ids"][-1] == 3
    asked = prepare("causal-lm", tokenizer=tokenizer, **data)
    assert ids(asked) == ids(prepared)
    as_bytes = prepare("causal-lm", {"vocab_size": 260}, tokenizer, tokenizer="bytes", **data)
    assert bytes(ids(as_bytes)[:8]) == b"the cat "


def test_long_text_is_tokenized_in_chunks(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch):
    import lemonx_lab.data.vocabulary as vocabulary

    text = "the cat\nsat on\nthe mat" * 20
    whole = vocabulary.from_folder(tokenizer).encode(text)
    monkeypatch.setattr(vocabulary, "_CHUNK", 30)
    assert len(list(vocabulary._chunks(text))) > 5
    assert "".join(vocabulary._chunks(text)) == text
    assert np.array_equal(vocabulary.from_folder(tokenizer).encode(text), whole)


def test_real_text_and_real_tokens(real: Path):
    text = prepare("causal-lm", kind="text", path=real / "text" / "shakespeare.txt", length=64)
    raw = (real / "text" / "shakespeare.txt").read_bytes()
    assert bytes(text.train[1]["input_ids"].tolist()) == raw[64:128]
    path = real / "text" / "story_tokens.npy"
    tokens = prepare("causal-lm", {"vocab_size": 512}, real / "stories260K", kind="tokens", path=path, length=64)
    assert tokens.train[2]["input_ids"].tolist() == np.load(path)[128:192].tolist()


# token ids


def test_tokens_are_split_at_their_end_and_counted(tmp_path: Path):
    np.save(tmp_path / "ids.npy", np.arange(1000, dtype=np.uint32) % 77)
    prepared = prepare("causal-lm", kind="tokens", path=tmp_path / "ids.npy", length=10)
    assert ids(prepared) == [number % 77 for number in range(950)]
    assert ids(prepared, "validation") == [number % 77 for number in range(950, 1000)]
    assert prepared.model == {"vocab_size": 77}


def test_masked_tokens_need_a_mask(tmp_path: Path):
    np.save(tmp_path / "ids.npy", np.arange(1000) % 77)
    masked = prepare("masked-lm", kind="tokens", path=tmp_path / "ids.npy", length=10, mask_token_id=77)
    assert masked.model["vocab_size"] == 78
    shown = torch.cat([example["input_ids"] for example in masked.train])
    assert (shown == 77).any()


# images


def arrays(count: int, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    return NOISE.integers(0, 256, (count, size, size), np.uint8), np.arange(count) % 3


def write_idx(path: Path, array: np.ndarray, compress: bool = False) -> None:
    codes = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}
    head = struct.pack(">HBB", 0, codes[array.dtype.name], array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    data = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if compress else data)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "float32", "float64"])
def test_idx_round_trip(tmp_path: Path, dtype: str):
    array = NOISE.integers(0, 100, (3, 4, 5)).astype(dtype)
    write_idx(tmp_path / "x", array, compress=dtype == "int16")
    read = read_idx(tmp_path / "x")
    assert read.dtype == array.dtype and np.array_equal(read, array)


@pytest.mark.parametrize("compress", [False, True])
def test_a_folder_of_idx_files(tmp_path: Path, compress: bool):
    suffix = ".gz" if compress else ""
    images, labels = arrays(12)
    for prefix, part in (("train", slice(0, 9)), ("t10k", slice(9, 12))):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{suffix}", images[part], compress)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte{suffix}", labels[part].astype(np.uint8), compress)
    prepared = prepare("image-classification", kind="idx", path=tmp_path, mean=[0.1], std=[0.5])
    assert prepared.model == {"num_labels": 3, "image_size": 8, "num_channels": 1}
    for examples, start in ((prepared.train, 0), (prepared.validation, 9)):
        for index, example in enumerate(examples):
            expected = (torch.tensor(images[start + index]).float() / 255 - 0.1) / 0.5
            assert torch.allclose(example["pixel_values"], expected[None], atol=1e-6)
            assert example["labels"] == labels[start + index]


@pytest.mark.parametrize("layout", ["grey", "last", "first", "float"])
def test_npz_layouts(tmp_path: Path, layout: str):
    images, labels = NOISE.integers(0, 256, (10, 8, 8, 3), np.uint8), np.arange(10)[:, None] % 2
    stored = {
        "grey": images[..., 0],
        "last": images,
        "first": images.transpose(0, 3, 1, 2),
        "float": images.astype(np.float64) / 255,
    }[layout]
    np.savez(tmp_path / "x.npz", x_train=stored[:8], y_train=labels[:8], x_test=stored[8:], y_test=labels[8:])
    prepared = prepare("image-classification", kind="npz", path=tmp_path / "x.npz")
    channels = 1 if layout == "grey" else 3
    assert prepared.model == {"num_labels": 2, "image_size": 8, "num_channels": channels}
    expected = torch.tensor(images[1]).permute(2, 0, 1)[:channels].float() / 255 * 2 - 1
    assert torch.allclose(prepared.train[1]["pixel_values"], expected, atol=1e-6)
    assert [int(example["labels"]) for example in prepared.validation] == [0, 1]


def test_npz_without_test_images_is_split(tmp_path: Path):
    images, labels = arrays(200)
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    prepared = prepare("image-classification", kind="npz", path=tmp_path / "x.npz", image_size=4)
    assert len(prepared.train) + len(prepared.validation) == 200 and len(prepared.validation) > 5
    assert prepared.train[0]["pixel_values"].shape == (1, 4, 4)
    some = prepare("image-classification", kind="npz", path=tmp_path / "x.npz", validation_examples=3)
    assert len(some.validation) == 3


def test_augmentation_shifts_and_mirrors(tmp_path: Path):
    image = np.arange(1, 65, dtype=np.uint8).reshape(8, 8)
    images, labels = np.repeat(image[None], 60, 0), np.arange(60) % 2
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    options = {"kind": "npz", "path": tmp_path / "x.npz", "mean": [0.0], "std": [1 / 255]}
    prepared = prepare("image-classification", augment=["crop", "flip"], **options)
    padded = [np.pad(each, 1) for each in (image, image[:, ::-1])]
    crops = {(m, i, j): padded[m][i : i + 8, j : j + 8] for m in (0, 1) for i in range(3) for j in range(3)}
    seen = set()
    for example in prepared.train:
        found = [
            key for key, crop in crops.items()
            if np.allclose(example["pixel_values"][0].numpy(), crop, atol=1e-3)
        ]  # fmt: skip
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 9
    assert all(np.allclose(example["pixel_values"][0].numpy(), image, atol=1e-3) for example in prepared.validation)


def save_images(root: Path, count: int = 4, classes: tuple[str, ...] = ("ant", "bee")) -> None:
    from PIL import Image

    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(count):
            colour = (255 * (number == 0), 255 * (number == 1), 10 * index)
            Image.new("RGB", (20, 10), colour).save(root / name / f"{index}.png")


def test_image_folders(tmp_path: Path):
    save_images(tmp_path / "train")
    save_images(tmp_path / "val", 2)
    prepared = prepare("image-classification", kind="images", path=tmp_path, image_size=6, mean=[0.0], std=[1.0])
    assert prepared.model == {"num_labels": 2, "image_size": 6, "num_channels": 3}
    assert len(prepared.train) == 8 and len(prepared.validation) == 4
    example = prepared.train[5]
    assert example["pixel_values"].shape == (3, 6, 6) and example["labels"] == 1
    assert torch.allclose(example["pixel_values"][:, 0, 0], torch.tensor([0, 1, 10 / 255]), atol=1e-6)
    grey = prepare("image-classification", kind="images", path=tmp_path, image_size=6, channels=1)
    assert grey.train[0]["pixel_values"].shape == (1, 6, 6)


def test_image_folder_without_validation_is_split_by_paths(tmp_path: Path):
    save_images(tmp_path, 40)
    prepared = prepare("image-classification", kind="images", path=tmp_path, image_size=4)
    names = [f"{name}/{index}.png" for name in ("ant", "bee") for index in range(40)]
    assert len(prepared.validation) == sum(map(held_out, names)) > 0
    assert len(prepared.train) == 80 - len(prepared.validation)


def test_the_middle_square_is_kept_and_crops_lie_inside(tmp_path: Path):
    from PIL import Image

    from lemonx_lab.data.pictures import pixels

    # Black, with a white square of 10x10 in the middle of 30x10.
    array = np.zeros((10, 30), np.uint8)
    array[:, 10:20] = 255
    image = Image.fromarray(array)
    middle = pixels(image, 10, 1, (), np.zeros(5))
    assert torch.equal(middle, torch.ones(1, 10, 10))
    for draw in NOISE.random((50, 5)):
        crop = pixels(image, 8, 1, ("crop", "flip"), draw)
        assert crop.shape == (1, 8, 8) and 0 <= crop.min() <= crop.max() <= 1
    left = pixels(Image.fromarray(np.tile(np.arange(10, dtype=np.uint8) * 20, (10, 1))), 10, 1, (), np.zeros(5))
    mirrored = pixels(
        Image.fromarray(np.tile(np.arange(10, dtype=np.uint8) * 20, (10, 1))), 10, 1, ("flip",), np.zeros(5)
    )
    assert torch.equal(mirrored, left.flip(-1))


# Hugging Face datasets


def save_dataset(path: Path, **splits: dict[str, list[Any]]) -> None:
    from datasets import Dataset, DatasetDict

    made = {name: Dataset.from_dict(columns) for name, columns in splits.items()}
    (made["all"] if "all" in made else DatasetDict(made)).save_to_disk(str(path))


def test_datasets_of_text(tmp_path: Path):
    save_dataset(tmp_path / "d", train={"text": ["abc" * 20] * 9}, validation={"text": ["xyz" * 20] * 2})
    prepared = prepare("causal-lm", kind="hf", path=tmp_path / "d", length=8)
    assert ids(prepared)[:62] == [*(b"abc" * 20), BYTES.sep, ord("a")]
    assert ids(prepared, "validation")[0] == ord("x")
    save_dataset(tmp_path / "one", all={"body": ["abc" * 20] * 200})
    whole = prepare("masked-lm", kind="hf", path=tmp_path / "one", text="body", length=10)
    assert len(whole.train) + len(whole.validation) == pytest.approx(200 * 61 / 8, abs=2)


def test_datasets_of_sentences(tmp_path: Path, tokenizer: Path):
    rows = {"sentence1": ["the cat", "mat"] * 5, "sentence2": ["sat", "on the"] * 5, "label": [1, 0] * 5}
    save_dataset(tmp_path / "d", train=rows, validation=rows)
    config = {"vocab_size": 10, "type_vocab_size": 2}
    prepared = prepare("sequence-classification", config, tokenizer, kind="hf", path=tmp_path / "d")
    batch = prepared.collate([prepared.train[0], prepared.train[1]])
    assert batch["input_ids"].tolist() == [[2, 5, 6, 3, 7, 3], [2, 9, 3, 8, 5, 3]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert batch["labels"].tolist() == [1, 0]


def test_datasets_of_images(tmp_path: Path):
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature
    from PIL import Image

    images = [Image.new("RGB", (8, 8), (255 * (number % 2), 0, 0)) for number in range(60)]
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["black", "red", "never"])})
    rows = {"image": images, "label": [number % 2 for number in range(60)]}
    Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "d"))
    prepared = prepare("image-classification", kind="hf", path=tmp_path / "d", image_size=4)
    assert prepared.model["num_labels"] == 3
    for example in prepared.train.__getitems__([0, 1, 2]):
        assert example["pixel_values"][0].mean() == pytest.approx(2 * float(example["labels"]) - 1)
    assert len(prepared.validation) > 0
