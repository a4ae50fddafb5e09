"""The reader: the same tensors as the library's, and every broken folder refused in one line."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.broken import (
    DTYPES,
    assert_one_line,
    edit_index,
    entry,
    raw_file,
    save_model,
    save_sharded,
    tensors,
    write_index,
)
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints import folder as folder_rules
from lemonx.errors import BadCheckpoint
from lemonx.verification import certificate
from lemonx_lab.training import run_folder as run

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_reads_what_the_library_wrote(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model(tmp_path, tensors(dtype))
    expected = load_file(tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.config == {"model_type": "llama"}
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            found = checkpoint.read(name)
            assert found.dtype == dtype
            assert found.shape == tensor.shape
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True
            assert checkpoint.tensors[name].nbytes == tensor.nbytes


def test_reads_rows_into_a_buffer(tmp_path: Path) -> None:
    weight = tensors()["weight"]
    with Checkpoint.open(save_sharded(tmp_path)) as checkpoint:
        assert torch.equal(checkpoint.read("weight", 2, 5), weight[2:5])
        assert checkpoint.read("weight", 7, 7).shape == (0, 3)
        out = torch.empty(3, 3)
        assert checkpoint.read("weight", 4, out=out) is out
        assert torch.equal(out, weight[4:])
        for start, stop in ((-1, 2), (3, 2), (0, 8)):
            with pytest.raises(ValueError):
                checkpoint.read("weight", start, stop)
        assert torch.equal(checkpoint.read("weight", 2, 5, columns=range(1, 3)), weight[2:5, 1:3])
        assert torch.equal(checkpoint.read("weight", columns=range(3)), weight)
        for columns in (range(1, 4), range(-1, 2), range(1, 1), range(0, 3, 2)):
            with pytest.raises(ValueError, match="columns"):
                checkpoint.read("weight", columns=columns)
        for bad in (torch.empty(4, 3), torch.empty(3, 3, dtype=torch.float64), torch.empty(3, 6)[:, ::2]):
            with pytest.raises(ValueError):
                checkpoint.read("weight", 4, out=bad)
    with pytest.raises(ValueError):
        checkpoint.read("weight")


def test_reads_from_many_threads(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.randn(200, 50) for i in range(8)}
    save_model(tmp_path, weights)
    wrong: list[str] = []
    with Checkpoint.open(tmp_path) as checkpoint:

        def work(name: str) -> None:
            for row in range(0, 200, 10):
                if not torch.equal(checkpoint.read(name, row, row + 10), weights[name][row : row + 10]):
                    wrong.append(name)

        threads = [threading.Thread(target=work, args=(name,)) for name in weights]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    if not before:
        pytest.skip("needs /proc")
    with Checkpoint.open(save_sharded(tmp_path)):
        pass
    (tmp_path / "stray.safetensors").write_bytes(b"")
    for _ in range(3):
        with pytest.raises(BadCheckpoint):
            Checkpoint.open(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


SHARDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: (f / "a.safetensors").unlink(), "a.safetensors' does not exist"),
    "truncated shard": (lambda f: os.truncate(f / "a.safetensors", 100), "a.safetensors' is truncated"),
    "empty shard": (lambda f: os.truncate(f / "a.safetensors", 0), "a.safetensors' is empty"),
    "stale shard": (lambda f: save_file(tensors(), f / "model.safetensors"), "is not listed in the index"),
    "an adapter": (lambda f: save_file(tensors(), f / "adapter_model.safetensors"), "give that with --adapter"),
    "path upwards": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update(weight="../a.safetensors")),
        "which is not a .safetensors file beside it",
    ),
    "absolute path": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update(weight="/etc/passwd")),
        "which is not a .safetensors file beside it",
    ),
    "another file": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update(weight="config.json")),
        "which is not a .safetensors file beside it",
    ),
    "wrong shard": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update(weight="b.safetensors")),
        "is not listed in the index",
    ),
    "swapped shard": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update(bias="a.safetensors")),
        "puts the tensor 'bias' in 'a.safetensors', but 'b.safetensors' holds it",
    ),
    "unknown tensor": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update(ghost="a.safetensors")),
        "names the tensor 'ghost', which no shard",
    ),
    "omitted tensor": (lambda f: edit_index(f, lambda i: i["weight_map"].pop("bias")), "omits the tensor 'bias'"),
    "tensor in two shards": (lambda f: save_file(tensors(), f / "a.safetensors"), "so does 'a.safetensors'"),
    "no weight_map": (lambda f: edit_index(f, lambda i: i.pop("weight_map")), "no 'weight_map'"),
    "weight_map is a list": (lambda f: edit_index(f, lambda i: i.update(weight_map=[])), "no 'weight_map'"),
    "weight_map to numbers": (
        lambda f: edit_index(f, lambda i: i.update(weight_map={"weight": 1})),
        "no 'weight_map'",
    ),
    "no metadata": (lambda f: edit_index(f, lambda i: i.pop("metadata")), "no 'metadata'"),
    "index is a list": (lambda f: write_index(f, []), "holds a list"),
    "index is not JSON": (lambda f: (f / INDEX).write_text("{"), "not valid JSON"),
    "index names a key twice": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "'a' comes twice",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json' does not exist"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{,}"), "not valid JSON"),
    "config is not UTF-8": (lambda f: (f / "config.json").write_bytes(b'{"a":"\xff"}'), "not valid JSON"),
    "dangling link": (
        lambda f: ((f / "a.safetensors").unlink(), (f / "a.safetensors").symlink_to("nowhere")),
        "link to nothing",
    ),
    "loop of links": (
        lambda f: ((f / "a.safetensors").unlink(), (f / "a.safetensors").symlink_to("a.safetensors")),
        "a.safetensors'",
    ),
    "link out of the folder": (
        lambda f: (
            (f / "a.safetensors").rename(f.parent / "elsewhere.safetensors"),
            (f / "a.safetensors").symlink_to("../elsewhere.safetensors"),
        ),
        "link out of its folder",
    ),
    "tokenizer that links out": (
        lambda f: (f / "tokenizer.json").symlink_to("/etc/passwd"),
        "link out of its folder",
    ),
    "shard is a folder": (
        lambda f: ((f / "a.safetensors").unlink(), (f / "a.safetensors").mkdir()),
        "not a regular file",
    ),
}


@pytest.mark.parametrize("case", SHARDED)
def test_a_broken_folder_is_refused(case: str, tmp_path: Path) -> None:
    damage, match = SHARDED[case]
    folder = save_sharded(tmp_path / "model")
    Checkpoint.open(folder).close()
    damage(folder)
    assert_one_line(BadCheckpoint, match, lambda: Checkpoint.open(folder))
    assert_one_line(BadCheckpoint, str(folder), lambda: Checkpoint.open(folder))


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert_one_line(BadCheckpoint, "neither model.safetensors nor", lambda: Checkpoint.open(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert_one_line(BadCheckpoint, "only pickled weights.*--allow-pickle", lambda: Checkpoint.open(tmp_path))
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.pt")
    assert_one_line(BadCheckpoint, "only pickled weights .model.pt.*allow-pickle", lambda: Checkpoint.open(tmp_path))
    (tmp_path / "other.pt").write_bytes(b"")
    (tmp_path / "optimizer.pt").write_bytes(b"")
    assert_one_line(BadCheckpoint, "several pickles .model.pt, other.pt.*as SOURCE", lambda: Checkpoint.open(tmp_path))
    for name in ("model.pt", "other.pt"):
        (tmp_path / name).unlink()
    assert_one_line(BadCheckpoint, "never loads.*save_pretrained", lambda: Checkpoint.open(tmp_path))


@pytest.mark.parametrize("wrapped", ["", "state_dict", "model", "module.", "blocks", "lightning"])
def test_what_training_scripts_save(wrapped: str, tmp_path: Path) -> None:
    """A single file of tensors, as a file or by its folder: bare, beside counts, or under the names of wrappers."""
    (tmp_path / "config.json").write_text("{}")
    stored: Any = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    if wrapped == "module.":
        stored = {f"module.{name}": tensor for name, tensor in stored.items()}
    elif wrapped == "blocks":  # each of them compiled
        stored = {"a": stored["a"], "_orig_mod.b": stored["b"]}
    elif wrapped == "lightning":  # of a module that has the model as an attribute
        stored = {f"net.{name}": tensor for name, tensor in stored.items()}
        stored = {"state_dict": stored, "pytorch-lightning_version": "2.6.6", "global_step": 3}
    elif wrapped:
        stored = {wrapped: stored, "epoch": 3, "optimizer": {"state": {0: torch.ones(3)}}}
    torch.save(stored, tmp_path / "last.ckpt")
    for given in (tmp_path, tmp_path / "last.ckpt"):
        with Checkpoint.open(given, allow_pickle=True) as opened:
            assert opened.tensors.keys() == {"a", "b"} and opened.converted
            assert opened.read("a").equal(torch.arange(6.0).reshape(2, 3)) and opened.origin == tmp_path
    assert_one_line(BadCheckpoint, "is not a folder: put the model's config.json", lambda: Checkpoint.open(given))


# Where training scripts keep an average of the weights, by the key that names it; None: a list has no names.
AVERAGES: dict[str, tuple[str | None, Callable[[dict[str, torch.Tensor]], Any]]] = {
    "by name": ("ema", lambda average: {"ema": average}),
    "compiled": ("model_ema", lambda average: {"model_ema": {f"_orig_mod.{n}": t for n, t in average.items()}}),
    "AveragedModel": (
        "ema_state_dict",
        lambda average: {
            "ema_state_dict": {"n_averaged": torch.tensor(3), **{f"module.module.{n}": t for n, t in average.items()}}
        },
    ),
    "inside": ("callbacks.EMA.weights", lambda average: {"callbacks": {"EMA": {"decay": 0.9, "weights": average}}}),
    "trained only": ("swa", lambda average: {"swa": {"a": average["a"]}}),
    "listed": (None, lambda average: {"ema": {"decay": 0.9, "shadow_params": list(average.values())}}),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_beside_the_weights_is_chosen_or_refused(kind: str, tmp_path: Path) -> None:
    """A file with the weights twice is not read until one of them is named; the states of parameters are no average."""
    key, kept = AVERAGES[kind]
    (tmp_path / "config.json").write_text("{}")
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    moments = {"state": {n: {"exp_avg": torch.zeros_like(t)} for n, t in weights.items()}, "lr": [0.1, 0.2]}
    content: dict[str, Any] = {"epoch": 3, "model": weights, "optimizer": moments}
    torch.save(content, tmp_path / "last.pt")
    Checkpoint.open(tmp_path, allow_pickle=True).close()
    torch.save({**content, **kept({n: tensor + 0.5 for n, tensor in weights.items()})}, tmp_path / "last.pt")
    said = f"weights once more .*'model' and '{key or 'ema.shadow_params'}': .*--weights model$"
    assert_one_line(BadCheckpoint, said, lambda: Checkpoint.open(tmp_path, allow_pickle=True))
    with Checkpoint.open(tmp_path, allow_pickle="model") as opened:
        assert opened.read("a").equal(weights["a"]) and "under 'model'" in str(opened.converted)
    if key is not None:
        with Checkpoint.open(tmp_path / "last.pt", allow_pickle=key) as opened:
            assert opened.read("a").equal(weights["a"] + 0.5) and opened.tensors.keys() <= {"a", "b"}
    wrong = "no weights by name under 'other': name others with --weights: 'model'"
    assert_one_line(BadCheckpoint, wrong, lambda: Checkpoint.open(tmp_path, allow_pickle="other"))


def test_lightning_saves_an_average_in_place_of_the_weights(tmp_path: Path) -> None:
    """Its WeightAveraging swaps the two, so that neither is what a reader expects."""
    (tmp_path / "config.json").write_text("{}")
    current, average = ({f"net.{name}": torch.full((2,), value) for name in "ab"} for value in (1.0, 2.0))
    content = {"pytorch-lightning_version": "2.6.6", "state_dict": average, "current_model_state": current}
    torch.save(content, tmp_path / "last.ckpt")
    said = "'state_dict' and 'current_model_state'"
    assert_one_line(BadCheckpoint, said, lambda: Checkpoint.open(tmp_path, allow_pickle=True))
    with Checkpoint.open(tmp_path, allow_pickle="current_model_state") as opened:
        assert opened.tensors.keys() == {"a", "b"} and opened.read("a").tolist() == [1.0, 1.0]


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert_one_line(BadCheckpoint, "does not exist", lambda: Checkpoint.open(tmp_path / "missing"))
    file = save_model(tmp_path) / "model.safetensors"
    assert_one_line(BadCheckpoint, "not a folder", lambda: Checkpoint.open(file))
    raw_file(file, {}, b"")
    assert_one_line(BadCheckpoint, "no tensors", lambda: Checkpoint.open(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (save_model(tmp_path) / "model.safetensors").chmod(0)
    assert_one_line(BadCheckpoint, "cannot be opened", lambda: Checkpoint.open(tmp_path))


@pytest.mark.parametrize("shared", [False, True])
def test_the_hub_cache_is_readable(shared: bool, tmp_path: Path) -> None:
    """snapshots/<rev>/x -> ../../blobs/<hash>, which may link on to the blobs that repositories share."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    save_model(snapshot)
    (snapshot / "1_Pooling").mkdir()
    (snapshot / "1_Pooling" / "config.json").write_text("{}")
    (repository / "blobs").mkdir()
    for number, name in enumerate(("config.json", "model.safetensors", "1_Pooling/config.json")):
        blob = repository / "blobs" / f"{number:064x}"
        (snapshot / name).rename(blob)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
        if shared:
            store = tmp_path / "blobs" / blob.name[:2] / blob.name
            store.parent.mkdir(parents=True, exist_ok=True)
            blob.rename(store)
            blob.symlink_to(os.path.relpath(store, blob.parent))
    with Checkpoint.open(snapshot) as checkpoint:
        assert torch.equal(checkpoint.read("weight"), tensors()["weight"])
        assert list(checkpoint.companions) == ["1_Pooling/config.json"]
    (snapshot / "vocab.txt").symlink_to("../../refs")
    (repository / "refs").write_text("private")
    assert_one_line(BadCheckpoint, "link out of its folder", lambda: Checkpoint.open(snapshot))


def test_a_linked_folder_and_links_inside_it_are_readable(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to("model")
    with Checkpoint.open(tmp_path / "link") as checkpoint:
        assert checkpoint.path == folder
        assert torch.equal(checkpoint.read("weight"), tensors()["weight"])


def test_companions(tmp_path: Path) -> None:
    save_model(tmp_path)
    carried = [
        "1_Pooling/config.json",
        "LICENSE",
        "added_tokens.json",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config_sentence_transformers.json",
        "generation_config.json",
        "merges.txt",
        "modules.json",
        "preprocessor_config.json",
        "sentence_bert_config.json",
        "data_config.json",
        "USE_POLICY.md",
        "tok512.bin",
        "tokenizer.bin",
        "words.tiktoken",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
        "vocab.txt",
    ]
    left = [
        "2_Dense/model.safetensors",
        "2_Dense/pytorch_model.bin",
        "README.md",
        "consolidated.safetensors",
        "modeling_custom.py",
        "onnx/model.onnx",
        "optimizer.pt",
        "pytorch_model.bin",
        "tokenization_custom.py",
        ".gitattributes",
        "adapter_config.json",
        "curve.csv",
        "events.out.tfevents.1",
        "flax_model.msgpack",
        "lemonx.json",
        "model.gguf",
        "rng_state.pth",
        "run.json",
        "scheduler.pt",
        "tf_model.h5",
        "trainer_state.json",
        "training_args.bin",
        "odd\x1b.txt",  # a name that cannot be shown
        os.fsdecode(b"odd\xff.txt"),  # or that is no text
    ]
    for name in carried + left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for number, magic in enumerate((b"PK\x03\x04zip", b"\x80\x02pickle", b"GGUF\x03")):
        (tmp_path / f"hidden{number}.bin").write_bytes(magic)
        left.append(f"hidden{number}.bin")
    (tmp_path / "elsewhere.json").symlink_to("/etc/hostname")  # nobody asks for it, so it is no error
    os.mkfifo(tmp_path / "pipe")
    left += ["elsewhere.json", "pipe"]
    for name, size in (("chat_template_large.json", 200_000_001), ("tokenizer_large.json", 200_000_001)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.companions) == {*carried, "tokenizer_large.json"}
        assert checkpoint.companions["LICENSE"] == tmp_path / "LICENSE"
        expected = {name for name in left if not name.startswith("onnx")}
        assert set(checkpoint.left_behind) == expected | {"onnx/", "chat_template_large.json"}


def test_what_lemonx_writes_is_no_companion() -> None:
    assert {certificate.FILE, run.RUN, run.CURVE, run.PICTURE} == set(folder_rules._OURS)


def test_a_source_that_changes_is_noticed(tmp_path: Path) -> None:
    path = save_model(tmp_path, {"w": torch.zeros(1000)}) / "model.safetensors"
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.check_unchanged()
        os.truncate(path, path.stat().st_size - 100)
        assert_one_line(BadCheckpoint, "changed while it was read", lambda: checkpoint.read("w"))
        assert checkpoint.read("w", 0, 900).shape == (900,)
        assert_one_line(BadCheckpoint, "changed while it was read", checkpoint.check_unchanged)


def test_a_digest_sees_every_byte(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        with Checkpoint.open(folder) as checkpoint:
            seen: list[int] = []
            content = checkpoint.content_digest(seen.append)
            assert sum(seen) == (folder / "model.safetensors").stat().st_size
            return content

    first = digest(save_model(tmp_path / "a"))
    assert digest(save_model(tmp_path / "b")) == first
    assert digest(save_model(tmp_path / "c", {k: v + 1 for k, v in tensors().items()})) != first
    (tmp_path / "b" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert digest(tmp_path / "b") != first


def test_tensors_are_in_file_order(tmp_path: Path) -> None:
    save_model(tmp_path)
    header = {"b": entry(0, 4), "a": entry(8, 12), "c": entry(4, 8)}
    raw_file(tmp_path / "model.safetensors", header, bytes(12))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["b", "c", "a"]
