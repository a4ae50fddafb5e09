"""A block that is not what the block it comes from is: every attribute and every module of it is looked at.

The faults here are those of a class that makes something of a block's index, or of its width, that no config says: the
models that the structure builds are changed in one place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lemonx
import pico
from lemonx.checkpoints import Checkpoint
from lemonx.models.building import skeleton
from lemonx.verification import structure
from lemonx.verification.structure import Structure, check_structure

Change = Callable[[Any], object]
# Which of the models that are built: the source's, one as wide as the target and as deep as the source, the target's.
SOURCE, WIDE, TARGET = range(3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Three blocks from two, and heads, keys and the MLP are wider: blocks 0 and 2 are the source's."""
    folder = tmp_path_factory.mktemp("structure")
    source = pico.save(pico.PICO["llama-tied"](), folder / "source")
    return source, lemonx.expand(source, folder / "target", verify=False, width=72, ffn=150, depth=3)


def check(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, changes: dict[int, Change] | None = None
) -> Structure:
    """What is found where these models are changed after they are built."""
    count = iter(range(3))

    def built(config: Any) -> Any:
        model = skeleton(config)
        (changes or {}).get(next(count), lambda _: None)(model)
        return model

    monkeypatch.setattr(structure, "looked_at", built)
    with Checkpoint.open(folders[0]) as small, Checkpoint.open(folders[1]) as large:
        return check_structure(lemonx.plan(folders[0], width=72, ffn=150, depth=3), small, large)


def test_an_honest_target(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(folders, monkeypatch)
    assert found.passed and found.blocks == 3 and found.attributes > 50


def setting(block: int, module: str, name: str, value: Any) -> Change:
    return lambda model: setattr(model.model.layers[block].get_submodule(module), name, value)


@pytest.mark.parametrize(
    ("which", "change", "says"),
    [
        (TARGET, setting(2, "self_attn", "scaling", 0.5), r"layers\.2\.self_attn has scaling = 0.5, in .*layers\.1"),
        (TARGET, setting(0, "self_attn", "is_causal", False), r"layers\.0\.self_attn has is_causal = False"),
        (TARGET, setting(1, "self_attn", "sliding_window", 4), r"layers\.1\.self_attn has sliding_window = 4"),
        (TARGET, setting(2, "mlp", "act_fn", torch.nn.ReLU()), r"layers\.2\.mlp\.act_fn is a ReLU, in .* a SiLU"),
        (TARGET, setting(0, "mlp", "gate", torch.nn.Identity()), r"mlp\.gate is a Identity, in .* there is none"),
        (TARGET, lambda m: delattr(m.model.layers[2].mlp, "act_fn"), r"layers\.2 has no mlp\.act_fn, which"),
        (WIDE, setting(1, "self_attn", "attention_dropout", 0.5), r"layers\.1\.self_attn has attention_dropout = 0\.5"),
        (WIDE, setting(1, "self_attn", "scaling", 7.0), r"layers\.[01]\.self_attn has scaling"),
        (WIDE, setting(0, "mlp", "act_fn", torch.nn.ReLU()), r"layers\.0\.mlp\.act_fn is a ReLU, in the source"),
        (
            WIDE,
            lambda m: delattr(m.model.layers[0].mlp, "act_fn"),
            r"layers\.0 has no mlp\.act_fn, which the source has",
        ),
        (SOURCE, setting(1, "self_attn", "is_causal", False), r"layers\.1\.self_attn has is_causal = True"),
    ],
)
def test_a_block_that_is_another(
    which: int, change: Change, says: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(folders, monkeypatch, {which: change})
    assert any(re.search(says, fault) for fault in found.wrong), found.wrong


def test_a_number_that_changes_alike_in_all_blocks_is_a_size(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def everywhere(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.scaling = 7.0

    assert check(folders, monkeypatch, {WIDE: everywhere, TARGET: everywhere}).passed


def test_the_class(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def other(model: Any) -> None:
        model.__class__ = type("Other", (type(model),), {})

    assert check(folders, monkeypatch, {TARGET: other}).wrong == ("the class is Other, the source's LlamaForCausalLM",)


def test_no_more_is_kept_than_one_can_read(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_them(model: Any) -> None:
        for layer in model.model.layers:
            for module in layer.modules():
                module.odd = "x"

    found = check(folders, monkeypatch, {TARGET: all_of_them})
    assert len(found.wrong) == structure.KEPT and found.reason().endswith(f"and {structure.KEPT - 1} more")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lossless": False}, "lossless = false"),
        ({"source": {"parameters": 3}}, "source.parameters = 3"),
        ({"target": None}, "target.parameters = null"),
        ({"exactness": {"bit-exact": 1000}}, 'exactness = {"bit-exact": 1000}'),
        ({"config": {}}, "config = {}"),
    ],
)
def test_a_certificate_that_says_what_is_not_so(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-untied"](), tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", width=72, verify=False).path
    assert lemonx.verify(source, target).passed
    path = target / "lemonx.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = lemonx.verify(source, target)
    assert not found.passed
    assert found.reason() == f"lemonx.json says {says}, which is not so"
