"""The only place where models, configs, tokenizers and data sets of others are loaded; a test enforces this.

transformers reads more of a folder than its weights: code that auto_map names, adapters, other files that config.json
points to. So it never sees the user's folder. It sees one of ours, with links to the weights that `Checkpoint` has
checked, and with config.json as it was read here. The files of a model do not decide how it is computed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict

import torch

from lemonx import architectures, models
from lemonx.checkpoints import Checkpoint, names_its_folder
from lemonx.checkpoints.creating import write_whole
from lemonx.checkpoints.folder import CONFIG, GENERATION, has, parse_object, tokenizer_files
from lemonx.checkpoints.opening import name_of, read_inside, read_small
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint, BadData, Refused
from lemonx.models.foreign import foreign
from lemonx.models.offloaded import read_from_store

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# What every loader of transformers is told.
_LOCAL: dict[str, bool] = {"local_files_only": True, "trust_remote_code": False}
# How a model is computed, in what dtype, and under what name it was saved.
_NOT_READ = frozenset(
    f"{begin}{name}{end}"
    for name in ("attn_implementation", "experts_implementation", "name_or_path", "commit_hash", "dtype", "torch_dtype")
    for begin in ("", "_")
    for end in ("", "_internal", "_autoset")
)
_TOKENIZER_CONFIG = "tokenizer_config.json"


# ----------------------------------------------------------------- configs


def config_object(values: Mapping[str, JsonValue], **changes: Any) -> Any:
    """A config.json as transformers' own object, with the defaults of its class, and with `changes` of its fields."""
    if not changes:
        return copy.deepcopy(_read(json.dumps(dict(values))))
    with Temporary() as folder:
        return _config_in(folder, values, changes)


@lru_cache(maxsize=16)
def _read(text: str) -> Any:
    """What transformers makes of a config.json: one expansion asks for that of the same few a dozen times."""
    with Temporary() as folder:
        return _config_in(folder, json.loads(text), {})


@names_its_folder
def read_config(checkpoint: Checkpoint, **changes: Any) -> Any:
    """The config of a checkpoint as transformers' own object."""
    return config_object(checkpoint.config, **changes)


def _config_in(folder: Path, values: Mapping[str, JsonValue], changes: Mapping[str, Any]) -> Any:
    """Write the fields of config.json that are used, and let transformers read them."""
    from transformers import AutoConfig

    models.register()
    if "model_type" not in values:  # one of timm's, which its family knows
        family = architectures.find(values)
        values = {**family.config(values), "model_type": family.model_types[0]}
    architectures.refuse_code(values)
    _check_fields(values)
    write_whole(folder / CONFIG, json.dumps(_without(values, _NOT_READ)))
    with foreign("read config.json", "save the model again"):
        config = AutoConfig.from_pretrained(folder, **_LOCAL, **changes)
        config.name_or_path = ""
    return config


def _without(values: Mapping[str, JsonValue], names: frozenset[str]) -> dict[str, JsonValue]:
    """config.json without these fields, in its parts too."""
    return {
        name: _without(value, names) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in names
    }


def _check_fields(values: Mapping[str, JsonValue]) -> None:
    """BadCheckpoint if a field is no setting of a model, but says what else to load, or stands for code.

    transformers turns all fields into attributes, and silently lets them replace its own methods.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    architectures.refuse_elsewhere(values)
    kind = values.get("model_type")
    known: Any = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else PreTrainedConfig
    settings = {field.name for field in fields(known)} | {"model_type"} | _NOT_READ
    for name, value in values.items():
        if name not in settings and _is_code(known, name):
            raise BadCheckpoint(
                f"sets {name[:80]!r}, which is a method of transformers' config", "remove that field", file=CONFIG
            )
        if isinstance(value, Mapping) and (name.endswith("_config") or name in known.sub_configs):
            _check_fields(value)


def _is_code(known: type, name: str) -> bool:
    """Whether a config's class has an attribute of this name that is not made to be set."""
    found = getattr(known, name, None)
    return name.startswith("__") or (hasattr(known, name) and not (isinstance(found, property) and found.fset))


def generation_config(checkpoint: Checkpoint, *, strict: bool = False) -> GenerationConfig:
    """The generation settings in a checkpoint's files. `strict`: they must be valid enough to be saved again."""
    from transformers import GenerationConfig

    own = GENERATION in checkpoint.companions
    file = checkpoint.origin / GENERATION if own else checkpoint.config_file
    content: Mapping[str, Any] = checkpoint.config
    if own:
        with checkpoint.open_companion(GENERATION) as opened:
            content = parse_object(read_small(opened, file), file)
    if odd := [name for name in content if own and _is_code(GenerationConfig, name)]:
        raise BadCheckpoint(
            f"sets {odd[0][:80]!r}, which is a method of transformers' config", "remove that field", file=file
        )
    with foreign(f"read {str(file)!r}", "mend it, or take it away"):
        make = GenerationConfig.from_dict if own else GenerationConfig.from_model_config
        settings = make(_without(content, frozenset({"trust_remote_code", "custom_generate"})))
        settings.validate(strict=strict)
        return settings


# ----------------------------------------------------------------- models


def class_named(name: Any) -> type[PreTrainedModel] | None:
    """The model class of transformers' own, or of this package, that has this name; None if there is none."""
    import transformers

    known = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
        return known
    return models.find(name)


def model_class(config: Any) -> Any:
    """The class that config.json names; the bare model if it names none."""
    import transformers

    if named := config.architectures:
        known = class_named(named[0]) if isinstance(named, list) else None
        if known is None:
            raise BadCheckpoint(
                f"names the class {str(named)[:80]}, which is not a model of transformers",
                "correct its architectures",
                file=CONFIG,
            )
        return known
    config.architectures = []  # Auto classes look through it
    if type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return transformers.AutoModelForImageClassification
    if type(config) not in transformers.MODEL_MAPPING:
        raise BadCheckpoint(
            "does not name the class of the model, and transformers has no default for it",
            'add the class that was saved, as "architectures": ["..."]',
            file=CONFIG,
        )
    return transformers.AutoModel


def build(kind: Any, config: Any, device: str = "cpu", **options: Any) -> PreTrainedModel:
    """A model that no file holds. `kind`: its class, or an Auto class, which chooses one.

    The device is set here and not by callers, because torch 2.6 cannot import transformers' models under "meta".
    """
    auto = kind.__name__.startswith("Auto")
    with torch.device(device):
        return kind.from_config(config, trust_remote_code=False, **options) if auto else kind(config)


@dataclass(frozen=True)
class _Unread:
    """A tensor as transformers takes one from a file: read once it is asked for."""

    checkpoint: Checkpoint
    name: str

    def __getitem__(self, every: Any) -> torch.Tensor:
        return self.checkpoint.read(self.name)


class LoadingInfo(TypedDict):
    """What transformers says of the weights it loaded: names, and for a mismatch the two shapes behind each."""

    missing_keys: set[str]
    unexpected_keys: set[str]
    mismatched_keys: set[tuple[str, tuple[int, ...], tuple[int, ...]]]


def load(
    checkpoint: Checkpoint, kind: Any, config: Any, *, generation: GenerationConfig | None = None, **options: Any
) -> tuple[PreTrainedModel, LoadingInfo]:
    """A model with a checkpoint's weights, and what transformers says of these; `options` go to from_pretrained.

    `generation`: its generation settings; those in the folder are not used.
    """
    from transformers import GenerationConfig

    # Weights that are in no safetensors are read when transformers comes to them, but from files while they are used.
    in_files = checkpoint.in_safetensors or "device_map" in options
    weights = None if in_files else {name: _Unread(checkpoint, name) for name in checkpoint.tensors}
    # transformers puts fused weights together from the numbers, and saves them.
    hollow = in_files and not checkpoint.in_safetensors and not _is_fused(checkpoint)
    model, info = kind.from_pretrained(
        None if weights else checkpoint.hollow if hollow else checkpoint.bare,
        state_dict=weights,
        config=config,
        generation_config=generation or GenerationConfig(),
        use_safetensors=True,
        output_loading_info=True,
        **_LOCAL,
        **options,
    )
    model.name_or_path = model.config.name_or_path = ""
    if hollow:
        read_from_store(model, checkpoint)
    return model, info


def _is_fused(checkpoint: Checkpoint) -> bool:
    """Whether a model computes with other tensors than its files hold."""
    from lemonx.models.building import disk_names, skeleton

    try:
        disk_names(skeleton(checkpoint.config), buffers=True)
    except Refused:
        return True
    return False


# ----------------------------------------------------------------- tokenizers and data sets


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, loaded only from the files that belong to a tokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    remedy = "save it again"
    with Temporary() as shown:
        for file, real in tokenizer_files(folder).items():
            if file != _TOKENIZER_CONFIG:
                (shown / file).symlink_to(real)
        _write_tokenizer_config(folder, shown)
        with foreign(f"read the tokenizer in {str(folder)!r}", remedy, BadData):
            found = AutoTokenizer.from_pretrained(shown, **_LOCAL)
    if not isinstance(found, PreTrainedTokenizerBase):
        raise BadData("names a class that is not a tokenizer", remedy, file=folder / _TOKENIZER_CONFIG)
    return found


def _write_tokenizer_config(folder: Path, into: Path) -> None:
    """The settings of a tokenizer, without names of files, and what config.json says of its class."""
    named = {name: {} for name in (_TOKENIZER_CONFIG, CONFIG)}
    for name in named:
        if has(folder, name):
            named[name] = parse_object(read_inside(folder.resolve(), name), folder / name)
    settings = {k: v for k, v in named[_TOKENIZER_CONFIG].items() if not k.endswith(("_file", "_files", "_inputs"))}
    if settings.get("auto_map") or settings.get("trust_remote_code"):
        raise BadData(
            "asks for code of its own (auto_map), which is never run",
            "remove auto_map if transformers has the tokenizer's class",
            file=folder / _TOKENIZER_CONFIG,
        )
    config = {name: named[CONFIG].get(name) for name in ("model_type", "tokenizer_class")}
    kept = {name: value for name, value in config.items() if isinstance(value, str)}
    write_whole(into / CONFIG, json.dumps(kept))
    if settings:
        write_whole(into / _TOKENIZER_CONFIG, json.dumps(settings))


def gguf_config(brief: Path, path: Path) -> dict[str, Any]:
    """The config that transformers reads from the checked header of the GGUF file `path`."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with foreign(f"read the settings of {str(path)!r}", "take the model's safetensors"):
        return load_gguf_checkpoint(brief)["config"]


def save_gguf_tokenizer(file: BinaryIO, folder: Path) -> None:
    """Write the tokenizer in an open GGUF file whose header was checked into an empty folder of ours."""
    from transformers import AutoTokenizer

    with Temporary() as shown, foreign("read the tokenizer", "take the model's safetensors"):
        (shown / "model.gguf").symlink_to(name_of(file.fileno()))
        tokenizer = AutoTokenizer.from_pretrained(shown, gguf_file="model.gguf", **_LOCAL)
        tokenizer.save_pretrained(folder)


def load_dataset(folder: Path) -> Any:
    """A Dataset that was saved in a folder, or a dict of them."""
    try:
        from datasets import load_from_disk
    except ImportError:
        raise BadData("data of kind hf needs the package datasets", "pip install lemonx[lab]") from None
    if "::" in str(folder) or "://" in str(folder):  # datasets would take it for an address
        raise BadData("has '::' or '://' in its name", "rename it", file=folder)
    with foreign(f"read {str(folder)!r}", "write it by save_to_disk", BadData, who="datasets"):
        return load_from_disk(str(folder))
