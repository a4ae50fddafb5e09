"""What is drawn for the folders of fuzzing_folders.py: a target, a command that reads it, and its damage.

A target is what is broken: `SHARES` says how many runs of a hundred each gets and which commands read it. Few of them
load a model, as that costs ten times as much as a plan.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

from fuzzing import byte_changes, header_of, json_changes, odd_values, with_header
from fuzzing_folders import NAMED, OUTPUT, RECIPE, RUN, SCRATCH, SHARDED, SIZES, Arena, Case


@dataclass(frozen=True)
class Share:
    """Of a hundred runs `runs` break this target; each command stands as often as it is drawn."""

    runs: int
    commands: tuple[str, ...]


def _often(**commands: int) -> tuple[str, ...]:
    return tuple(name for name, count in commands.items() for _ in range(count))


SHARES = {
    "config": Share(31, _often(plan=40, fsck=20, why=20, recipe=14, expand=3, verify=3)),
    "generation_config": Share(5, _often(expand=15, written=80, verify=5)),
    "index": Share(12, _often(plan=45, fsck=30, why=20, written=4, verify=1)),
    "header": Share(15, _often(plan=45, fsck=30, why=16, written=8, verify=1)),
    "companions": Share(6, _often(written=80, fsck=18, expand=2)),
    "lemonx.json": Share(5, _often(replace=65, fsck=10, verify=25)),
    "optimizer": Share(6, _often(written=98, expand=2)),
    "recipe": Share(10, _often(train=1)),
    "data": Share(1, _often(train=1)),
    "result": Share(4, _often(report=1)),
    "options": Share(5, _often(plan=50, written=20, recipe=20, train=10)),
}


@cache
def cases(arena: Arena, target: str) -> st.SearchStrategy[Case]:
    """A command that reads the target, and the damage: mostly to one file, sometimes to two."""

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        command = draw(st.sampled_from(SHARES[target].commands))
        source, grown, sizes = draw(_folders(target))
        arguments = draw(_arguments(command, target, source, grown, sizes))
        broken = _broken(arena, target, command, source, grown, tuple(arguments))
        # What is replaced is there: an expansion, before its damage.
        there = arena.model_files(grown) if command == "replace" else []
        files: dict[str, bytes | None] = {OUTPUT + name.removeprefix(grown): arena.files[name] for name in there}
        for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2])) if broken else 0):
            name = draw(st.sampled_from(broken))
            files[name] = draw(_damage(arena, name))
        plain = draw(st.integers(0, 9)) > 0
        return Case(target, tuple(arguments), files, {} if plain else {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})

    return draw_case()


@st.composite
def _folders(draw: st.DrawFn, target: str) -> tuple[str, str, tuple[str, ...]]:
    """A model, what it was expanded to, and by which options."""
    if target == "optimizer":
        return draw(st.sampled_from([RUN, NAMED])), "models/gpt2-lm/target", SIZES["gpt2-lm"]
    model = SHARDED if target == "index" else draw(st.sampled_from(sorted(SIZES)))
    return f"models/{model}/source", f"models/{model}/target", SIZES[model]


_ODD_TEXTS = st.sampled_from(
    ["0", "-1", "1", "7", "48", "1e3", "1.5", "3/2", "nan", "inf", "-inf", "1e5000", "1/0", "9" * 30, "9" * 5000, "é",
     "", "[]", "null", "true", "\udcff", "2**40", str(2**24), str(2**24 + 1), "100000", "1e-5000", "x" * 5000, "..",
     "[" * 100_000, "0x10", "1_0", "\u0663", "[red]x[/red]"]
)  # fmt: skip
_FIELDS = st.sampled_from(
    ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "n_embd", "n_layer",
     "tie_word_embeddings", "depths", "image_size", "model_type", "num_local_experts", "", "a.b", "é"]
)  # fmt: skip
_ADVICE = (
    "--steps",
    "--epochs",
    "--tokens",
    "--warmup",
    "--learning-rate",
    "--min-learning-rate",
    "--batch-size",
    "--format",
)


@st.composite
def _arguments(
    draw: st.DrawFn, command: str, target: str, source: str, grown: str, sizes: tuple[str, ...]
) -> list[str]:
    """The command line of a command, with odd options if these are the target.

    `written` is an expansion that is not verified, `replace` one over an OUTPUT that is there.
    """
    odd = target == "options"
    as_json = draw(st.sampled_from([[], [], ["--json"]]))
    if command == "train":
        recipe = "work/scratch.yaml" if draw(st.integers(0, 2)) == 0 else "work/recipe.yaml"
        changes = ["--set", f"{draw(st.sampled_from(_KEYS))}={draw(_ODD_TEXTS | _YAML)}"] if odd else []
        return ["train", recipe, "-o", OUTPUT, *changes, *as_json]
    if command == "report":
        return ["report", *["work/result.json"] * draw(st.integers(1, 2)), "-o", OUTPUT]
    if command == "why":
        return ["architectures", "--why", source, *as_json]
    if command == "fsck":
        more = draw(st.sampled_from([[], ["--json"], ["--quick"], ["--allow-pickle"]]))
        return ["fsck", grown if target == "lemonx.json" else source, *more]
    if command == "recipe":
        return ["recipe", source, grown, *([draw(st.sampled_from(_ADVICE)), draw(_ODD_TEXTS)] if odd else [])]
    if command == "verify":
        return ["verify", source, grown, *draw(st.sampled_from([[], ["--json"], ["--layerwise"]]))]
    words = ["plan", source] if command == "plan" else ["expand", source, OUTPUT]
    words += ["--no-verify"] * (command in ("written", "replace")) + ["--force"] * (command == "replace")
    words += ["--with-optimizer"] * (target == "optimizer")
    return [*words, *sizes, *(draw(_odd_options(command, grown)) if odd else []), *as_json]


@st.composite
def _odd_options(draw: st.DrawFn, command: str, grown: str) -> list[str]:
    flags = ["--width", "--depth", "--heads", "--kv-heads", "--ffn", "--seed", "--method", "--dtype",
             "--free"]  # fmt: skip
    flags += ["--shards", "--threads"] if command == "written" else []
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return ["--set", f"{draw(_FIELDS)}={draw(_ODD_TEXTS)}"]
    if kind == 1:
        return ["--like", draw(st.sampled_from([grown, f"{grown}/config.json", "work", "work/ids.npy", "é"]))]
    return [draw(st.sampled_from(flags)), draw(_ODD_TEXTS)]


_NAMES = {
    "config": "config.json",
    "generation_config": "generation_config.json",
    "index": "model.safetensors.index.json",
}
_COMPANIONS = ("tokenizer_config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "README.md")


@cache
def _broken(arena: Arena, target: str, command: str, source: str, grown: str, arguments: tuple[str, ...]) -> list[str]:
    """The files that are damaged: those of the target that the command reads."""
    if target == "options":
        return []
    if target == "result":
        return ["work/result.json"]
    if target == "recipe":
        return [arguments[1]]
    if target == "data":
        return ["work/ids.npy" if arguments[1] == "work/recipe.yaml" else "work/images.npz"]
    if target == "lemonx.json":
        return [f"{OUTPUT if command == 'replace' else grown}/lemonx.json"]
    folders = [source, grown] if command in ("verify", "recipe") else [source]
    found = [(folder, name.removeprefix(f"{folder}/")) for folder in folders for name in arena.model_files(folder)]
    if target == "header":
        wanted = [(folder, name) for folder, name in found if name.endswith(".safetensors") and "/" not in name]
    elif target == "optimizer":
        kinds = (".pt", "trainer_state.json")
        wanted = [(folder, name) for folder, name in found if name.endswith(kinds) or name.startswith("optimizer/")]
    elif target == "companions":
        wanted = [(folder, name) for folder in folders for name in _COMPANIONS]
    else:
        wanted = [(folder, name) for folder, name in found if name == _NAMES[target]]
    return [f"{folder}/{name}" for folder, name in wanted]


_KEYS = [*RECIPE, *SCRATCH, "data.length", "data.path", "data.kind", "expand.width", "expand.set", "optimizer.eps",
         "config.hidden_size", "config.num_hidden_layers", "config.image_size", "expand.depth", "expand.seed",
         "data.image_size", "eval_batch_size", "gradient_accumulation", "seed", "clip", "eval_every", "precision",
         "inheritance.kind", "inheritance.teacher", "report_to", "warmup_epochs", "expand.like", "decay"]  # fmt: skip
_BOMB = "[&a [x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"&{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]" for n in range(9)
) + "]"  # fmt: skip
_YAML_TEXTS = [
    *("&a [*a]", "&a {b: *a}", _BOMB, "!!python/object/apply:os.system [id]", "2001-01-01", "2001-99-99", "1:30:00",
     "0x" + "f" * 5000, "0b" + "1" * 20_000, "!!binary x", "!!binary aGVsbG8=", "!!set {a, b}", "!!omap [a: 1]",
     "!!int ''", "!!float ''", "!!timestamp x", "!!bool x", "? [a]\n: b", "~", ".nan", ".inf", "-.inf", "1e300",
     "[" * 2000, "{a: " * 2000, "- - - - a", "\t", "'", "%YAML 9.9", "---\na\n---\nb", "<<: {a: 1}", "9" * 100,
     "9" * 5000, "!!str 1", "9999-12-31T23:59:59-23:59", "é", "\u2028", "[1, 2, 3]", "{kind: digits}"),
]  # fmt: skip
_YAML = st.sampled_from(_YAML_TEXTS)


@cache
def _damage(arena: Arena, name: str) -> st.SearchStrategy[bytes | None]:
    """Other bytes for a file, by what kind of file it is; or no file, or that of another model."""
    good = arena.files.get(name) or arena.files.get(name.replace(OUTPUT, f"models/{SHARDED}/target"))
    if good is None:
        return st.one_of(st.binary(max_size=40), _json({"word_embedding_dimension": 48}, []))
    others = [raw for other, raw in arena.files.items() if other != name and Path(other).name == Path(name).name]
    rare = st.one_of(
        st.none(), st.sampled_from([b"", b"\0" * 9, *others]), byte_changes().map(lambda change: change(good))
    )
    if name.endswith(".json"):
        return st.one_of(*[_json(json.loads(good), _vocabulary(arena, name))] * 3, rare)
    if name.endswith(".safetensors"):
        header, rest = header_of(good)
        return st.one_of(_json(header, []).map(lambda text: with_header(text, rest)), rare)
    if name.endswith(".pt"):
        return st.one_of(_pickle(good), _pickle(good), rare)
    if name.endswith(".yaml"):
        return st.one_of(_yaml(yaml.safe_load(good)), _yaml(yaml.safe_load(good)), rare)
    return rare


# JSON that json.dumps does not write, by the text that stands for it until then.
_RAW = {
    "deep": "[" * 900 + "]" * 900,
    "deeper": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "digits": "9" * 4000,
    "too-many-digits": "9" * 5000,
    "nan": "NaN",
    "infinity": "-Infinity",
    "large": "1e999",
    "surrogate": '"\\ud800"',
    "long": '"' + "x" * 200_000 + '"',
    "twice": '{"a": 1, "a": 2}',
    "escape": '"\\u001b[31m"',
}


def _json(content: Any, vocabulary: list[str]) -> st.SearchStrategy[bytes]:
    values = odd_values() | st.sampled_from([f"@@{name}@@" for name in _RAW])
    return json_changes(values, vocabulary).map(lambda change: _spelled(change(content)))


def _spelled(content: Any) -> bytes:
    text = json.dumps(content)
    for name, raw in _RAW.items():
        text = text.replace(f'"@@{name}@@"', raw)
    return text.encode()


def _vocabulary(arena: Arena, name: str) -> list[str]:
    """The keys of all files of this name, and some that transformers knows."""
    found = {
        key
        for other, raw in arena.files.items()
        if Path(other).name == Path(name).name and isinstance(content := json.loads(raw), dict)
        for key in content
    }
    if name.endswith("config.json"):
        found |= {"quantization_config", "auto_map", "pruned_heads", "layer_types", "num_labels", "id2label",
                  "problem_type", "rope_scaling", "rope_parameters", "sliding_window", "dtype", "torch_dtype",
                  "stop_strings", "num_beams", "image_size", "is_decoder", "text_config", "output_attentions",
                  "chunk_size_feed_forward", "use_cache", "return_dict", "_attn_implementation"}  # fmt: skip
    return sorted(found)


def _yaml(content: Any) -> st.SearchStrategy[bytes]:
    marks = {f"@@{number}@@": text for number, text in enumerate(_YAML_TEXTS)}

    def spelled(change: Callable[[Any], Any]) -> bytes:
        text = yaml.safe_dump(change(content), allow_unicode=True)
        for mark, raw in marks.items():
            text = text.replace(f"'{mark}'", raw)
        return text.encode(errors="surrogatepass")

    return json_changes(odd_values() | st.sampled_from(sorted(marks)), _KEYS).map(spelled)


def _pickle(good: bytes) -> st.SearchStrategy[bytes]:
    content = torch.load(io.BytesIO(good), weights_only=True)
    tensors = [torch.zeros(()), torch.zeros(2), torch.full((3,), torch.nan), torch.zeros(1).expand(10**6, 10**6),
               torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool), torch.zeros(0)]  # fmt: skip
    values = odd_values() | st.sampled_from(tensors)

    def saved(change: Callable[[Any], Any]) -> bytes:
        file = io.BytesIO()
        torch.save(change(content), file)
        return file.getvalue()

    return json_changes(values, ["state", "param_groups", "params", "step", "exp_avg"]).map(saved)
