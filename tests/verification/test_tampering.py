"""Whatever is changed in a target so that it computes something else is noticed, and told where it is.

Whether a change has an effect is measured with transformers alone, in float64, on inputs that hold every token, every
position and every type of token that the source knows. `make tampering` does the same to more families, and counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lemonx
import pico
import tampering
from lemonx.checkpoints import Checkpoint
from lemonx.verification.structure import beside_faults
from tampering import CASES, MORE, Case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_some_entries_of_every_tensor(case: Case, tmp_path: Path) -> None:
    with tampering.grown(case, tmp_path) as made:
        assert made.algebra().passed
        caught, free = tampering.sorted_out(made, 1)
        assert len(caught) > len(made.target.tensors) / 3
        with tampering.all_of(free):
            assert made.algebra().passed
            # All at once, what was let pass changes nothing.
            assert made.effect() <= made.tolerance, [str(change) for change in free]
        assert made.algebra().passed


# Types of layer, windows, tables of positions, a scan: the rest of the families is for the benchmark.
CONFIGS = [case for case in CASES if str(case) in ("gpt2-lm", "gemma2", "swin-cls", "mamba2")]


@pytest.mark.parametrize("case", CONFIGS, ids=str)
def test_every_field_of_config_json(case: Case, tmp_path: Path) -> None:
    with tampering.grown(case, tmp_path) as made:
        assert not tampering.config_is_caught(made)
        fields, missed = tampering.fields(made), []
        for path, other in fields:
            with tampering.other_config(made.folder, path, other):
                if not tampering.config_is_caught(made):
                    missed.append(path)
                    assert made.effect() <= made.tolerance, (path, other)
        assert len(missed) < 5 < 20 < len(fields)
        assert not tampering.config_is_caught(made)


def test_the_parts_of_a_config(tmp_path: Path) -> None:
    """A part has a dtype of its own, which transformers does not show; and it may write down what it found."""
    case = next(case for case in MORE if case.model == "clip")
    with tampering.grown(case, tmp_path) as made:
        for path, other, caught in (
            (("text_config", "dtype"), "float16", True),
            (("vision_config", "torch_dtype"), "bfloat16", True),
            (("text_config", "dtype"), "float64", False),
            (("text_config", "layer_norm_eps"), 1e-3, True),
        ):
            with tampering.other_config(made.folder, path, other):
                assert tampering.config_is_caught(made) == caught, path
        made.kind.from_pretrained(made.folder, dtype=torch.float64).save_pretrained(made.folder)
        assert not tampering.config_is_caught(made)


BESIDE: dict[str, Any] = {
    "tokenizer.json": {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}},
    "tokenizer_config.json": {"add_bos_token": True, "model_max_length": 64},
    "special_tokens_map.json": {"eos_token": "b"},
    "added_tokens.json": {"<x>": 60},
    "generation_config.json": {"eos_token_id": 2, "temperature": 0.5, "do_sample": True},
    "preprocessor_config.json": {"image_mean": [0.5, 0.5, 0.5], "do_normalize": True},
    "merges.txt": "a b\n",
    "chat_template.jinja": "{{ messages }}",
}


@pytest.fixture(scope="module")
def with_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with files beside its weights, and its expansion."""
    folder = tmp_path_factory.mktemp("beside")
    source = pico.save(pico.PICO["llama-tied"](), folder / "source")
    for name, content in BESIDE.items():
        (source / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return source, lemonx.expand(source, folder / "target", ffn=150, verify=False).path


def beside(folders: tuple[Path, Path]) -> list[str]:
    with Checkpoint.open(folders[0]) as small, Checkpoint.open(folders[1]) as large:
        return list(beside_faults(lemonx.plan(folders[0], ffn=150), small, large))


@pytest.mark.parametrize("name", BESIDE)
def test_every_value_of_the_files_beside(name: str, with_files: tuple[Path, Path]) -> None:
    assert not beside(with_files)
    file, content = with_files[1] / name, BESIDE[name]
    text = file.read_text()
    others = [f"{content}x"] if isinstance(content, str) else [json.dumps(other) for other in variants(content)]
    try:
        for other in others:
            file.write_text(other)
            assert beside(with_files) == [f"{name} is not what the source's becomes"], other
        file.unlink()
        assert beside(with_files) == [f"{name} is missing, which the source has"]
    finally:
        file.write_text(text)
    if not isinstance(content, str):
        file.write_text(json.dumps(content, indent=7))
        assert not beside(with_files), "how it is laid out is nobody's business"
        file.write_text(text)


def variants(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same with another value in one place, without a field, and with one more."""
    for path, other in tampering.settings(content):
        copy = json.loads(json.dumps(content))
        where = copy
        for part in path[:-1]:
            where = where[part]
        where[path[-1]] = other
        yield copy
    first = next(iter(content))
    yield {name: value for name, value in content.items() if name != first}
    yield {**content, "one_more": 1}


@pytest.mark.parametrize("name", ["adapter_config.json", "vocab.json", "processor_config.json"])
def test_a_file_that_the_source_has_not(name: str, with_files: tuple[Path, Path]) -> None:
    file = with_files[1] / name
    file.write_text("{}")
    try:
        assert [fault.split()[0] for fault in beside(with_files)] == [name]
        assert not lemonx.verify(*with_files).passed
    finally:
        file.unlink()
