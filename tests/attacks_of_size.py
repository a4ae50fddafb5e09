"""All attacks: those of attacks.py, numbers that ask for all time or memory, and teachers and data of a run."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attacks
import faults
from attacks import Attack, Prepare, put, recipe, result
from commands import BAD_CHECKPOINT, BAD_TARGET, CANNOT_VERIFY, REFUSED

SIZE = "a number, or a file, that asks for all time or all memory"
RUN = "a teacher, or a picture, that is not what a run may read"


def _model(name: str, command: tuple[Any, ...], **fields: Any) -> Prepare:
    """A small model of another family, with fields of its config.json changed."""

    def prepare(folder: Path) -> tuple[Any, ...]:
        import pico

        pico.save(pico.PICO[name](), folder / "model")
        faults._config(**fields)(folder / "model")
        output = [folder / "out"] if command[0] == "expand" else []
        return (command[0], folder / "model", *output, *command[1:])

    return prepare


def _empty_tensors(folder: Path) -> tuple[Any, ...]:
    """A header that names 300,000 tensors without a number."""
    import fuzzing

    file = folder / "source" / faults.FIRST
    header, rest = fuzzing.header_of(file.read_bytes())
    header |= {f"x.{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(300_000)}
    file.write_bytes(fuzzing.with_header(json.dumps(header).encode(), rest))
    return "plan", folder / "source", "--depth", 3


def _inflating(folder: Path) -> tuple[Any, ...]:
    """Pictures in 8 MB that are 8 GB: a member of 64 MB of zeros, repeated."""
    data, count = folder / "data", 128 * 2**26 // (28 * 28)
    data.mkdir()
    head = b"\0\0\x08\x03" + count.to_bytes(4, "big") + (28).to_bytes(4, "big") * 2
    zeros = gzip.compress(bytes(2**26), 9)
    for name in ("train", "t10k"):
        with (data / f"{name}-images-idx3-ubyte.gz").open("wb") as file:
            file.write(gzip.compress(head))
            for _ in range(129):
                file.write(zeros)
        labels = b"\0\0\x08\x01" + (4).to_bytes(4, "big") + bytes(4)
        (data / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return _pictures(folder, f"{{kind: idx, path: {json.dumps(str(data))}}}")


PICTURES = """\
task: image-classification
config: {model_type: vit, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 8}
data: DATA
steps: 1
batch_size: 2
learning_rate: 1e-3
warmup: 0
"""


def _pictures(folder: Path, data: str) -> tuple[Any, ...]:
    (folder / "recipe.yaml").write_text(PICTURES.replace("DATA", data))
    return "train", folder / "recipe.yaml", "-o", folder / "out"


def _recipe(change: Callable[[str], str]) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        file = recipe(folder)
        file.write_text(change(file.read_text()))
        return "train", file, "-o", folder / "out"

    return prepare


def _bomb(depth: int) -> str:
    """Lists of nine of the list before: 9 to the power of `depth` words, in a few hundred bytes."""
    lists = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lists += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, depth)]
    return "\n".join(lists)


def _result(change: Callable[[Any], str]) -> Prepare:
    def prepare(folder: Path) -> tuple[Any, ...]:
        file = result(folder)
        file.write_text(change(json.loads(file.read_text())))
        return "report", file, "-o", folder / "page.html"

    return prepare


def _with(content: Any, value: str, *keys: Any) -> str:
    """The JSON of a result in which a text stands in the place that keys lead to."""
    holder = content
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = "@@"
    return json.dumps(content).replace('"@@"', value)


def _teacher(change: Callable[[Path], object]) -> Prepare:
    """A run whose teacher is the sound checkpoint, changed."""

    def prepare(folder: Path) -> tuple[Any, ...]:
        shutil.copytree(folder / "source", folder / "teacher")
        change(folder / "teacher")
        return _taught_by(folder, folder / "teacher")

    return prepare


def _taught_by(folder: Path, teacher: Path | str) -> tuple[Any, ...]:
    file = recipe(folder)
    file.write_text(file.read_text() + f"inheritance: {{kind: soft, teacher: {json.dumps(str(teacher))}}}\n")
    return "train", file, "-o", folder / "out"


def _evil_pickle(teacher: Path) -> None:
    faults.as_pickles(teacher)
    put(teacher / "pytorch_model.bin", "pickle")


def _row_images(path: Callable[[Path], str]) -> Prepare:
    """A data set on disk whose pictures are not stored, but named."""

    def prepare(folder: Path) -> tuple[Any, ...]:
        import datasets

        datasets.disable_progress_bars()
        images = [{"bytes": None, "path": path(folder)}] * 4
        rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 0, 1]})
        stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
        rows = rows.cast(datasets.Features({"image": stored, "label": datasets.Value("int64")}))
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(folder / "rows")
        for split in ("train", "validation"):  # saved as pictures, they would be read at once
            faults._json("dataset_info.json", lambda content: content["features"].update(image={"_type": "Image"}))(
                folder / "rows" / split
            )
        data = f"{{kind: hf, path: {json.dumps(str(folder / 'rows'))}, image_size: 16}}"
        return _pictures(folder, data)

    return prepare


LARGE = 20_000
ATTACKS = [
    *attacks.ATTACKS,
    Attack(SIZE, "image_size 20000", _model("vit-cls", ("plan", "--depth", 3), image_size=LARGE), BAD_CHECKPOINT,
           "positions per example: use a whole number up to"),
    Attack(SIZE, "image_size 20000 of windows", _model("swinv2-cls", ("plan", "--width", "2x"), image_size=LARGE),
           BAD_CHECKPOINT, "positions per example: use a whole number up to"),
    Attack(SIZE, "image_size 20000 of convolutions, verified",
           _model("resnet-basic", ("expand", "--width", "2x"), image_size=LARGE), CANNOT_VERIFY, "picture"),
    Attack(SIZE, "300,000 tensors without a number", _empty_tensors, BAD_CHECKPOINT, "300"),
    Attack(SIZE, "`--set num_hidden_layers=100000`",
           lambda folder: ("plan", folder / "source", "--set", "num_hidden_layers=100000"), BAD_TARGET, "100000"),
    Attack(SIZE, "10^30 layers in config.json",
           lambda folder: (faults._config(num_hidden_layers=10**30)(folder / "source"),
                           ("plan", folder / "source", "--width", 96))[1], BAD_CHECKPOINT, "num_hidden_layers"),
    Attack(SIZE, "pictures in 8 MB that inflate to 8 GB", _inflating, BAD_CHECKPOINT, "train-images-idx3-ubyte.gz"),
    Attack(SIZE, "`steps` of 100 digits", _recipe(lambda text: text.replace("steps: 2", f"steps: {'9' * 100}")),
           BAD_TARGET, "steps"),
    Attack(SIZE, "a number of 5,000 digits in a recipe",
           _recipe(lambda text: text.replace("steps: 2", f"steps: {'9' * 5000}")), BAD_TARGET, "recipe.yaml"),
    Attack(SIZE, "aliases of aliases in a recipe", _recipe(lambda text: f"{_bomb(12)}\n{text}"), BAD_TARGET,
           "recipe.yaml"),
    Attack(SIZE, "an alias of itself in a recipe", _recipe(lambda text: f"{text}stages: &a [*a]\n"), BAD_TARGET,
           "recipe.yaml"),
    Attack(SIZE, "a result.json that is a list", _result(lambda _: "[]"), BAD_TARGET, "result.json"),
    Attack(SIZE, "a result.json of 20,000 nested objects", _result(lambda _: '{"a":' * 20_000 + "1" + "}" * 20_000),
           BAD_TARGET, "result.json"),
    Attack(SIZE, "a result.json with a number of 5,000 digits",
           _result(lambda content: _with(content, "9" * 5000, "seeds")), BAD_TARGET, "result.json"),
    Attack(SIZE, "a result.json whose arms are a number", _result(lambda content: _with(content, "1", "arms")),
           BAD_TARGET, "result.json"),
    Attack(RUN, "a teacher of pickled weights", _teacher(faults.as_pickles), BAD_CHECKPOINT, "only pickled weights"),
    Attack(RUN, "a teacher that is a pickle that runs a command", _teacher(_evil_pickle), BAD_CHECKPOINT,
           "only pickled weights"),
    Attack(RUN, "a teacher whose weights are a private file",
           _teacher(lambda teacher: put(teacher / faults.FIRST, "link")), BAD_CHECKPOINT, "a link out of its folder"),
    Attack(RUN, "a teacher whose weights are a pipe",
           _teacher(lambda teacher: put(teacher / faults.FIRST, "pipe")), BAD_CHECKPOINT, "not a regular file"),
    Attack(RUN, "a teacher with code of its own",
           _teacher(faults._config(auto_map={"AutoModelForCausalLM": "evil.Evil"})), REFUSED, "auto_map"),
    Attack(RUN, "a teacher by its id on the hub", lambda folder: _taught_by(folder, "openai-community/gpt2"),
           BAD_CHECKPOINT, "lemonx downloads nothing"),
    Attack(RUN, "pictures of a data set that are addresses", _row_images(lambda _: "https://example.org/x.png"),
           BAD_CHECKPOINT, "lemonx downloads nothing"),
    Attack(RUN, "pictures of a data set that are addresses in an archive",
           _row_images(lambda _: "zip://x.png::https://example.org/x.zip"), BAD_CHECKPOINT, "lemonx downloads nothing"),
    Attack(RUN, "pictures of a data set that are a pipe",
           _row_images(lambda folder: str(put(folder / "x.png", "pipe"))), BAD_CHECKPOINT, "not a regular file"),
    Attack(RUN, "pictures of a data set that are a device",
           _row_images(lambda folder: str(put(folder / "x.png", "device"))), BAD_CHECKPOINT, "not a regular file"),
]  # fmt: skip
