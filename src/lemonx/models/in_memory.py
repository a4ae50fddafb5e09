"""Models in memory: which of them can be expanded, and how the larger model gets the properties of the given one.

A model is expanded as a checkpoint whose weights lie in memory, so plan, check and verification are the same. What a
checkpoint does not hold is restored: the dtype and requires_grad of every parameter, attention, modes, the device.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.creating import new_folder, write_whole
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import parse_json
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.checkpoints.shards import config_text
from lemonx.checkpoints.store import InMemory
from lemonx.errors import Refused
from lemonx.execution.sidecar_files import Carried, pointing
from lemonx.models import door
from lemonx.models.attributes import bare_class, is_rate, plain_attributes, same
from lemonx.models.building import held_in, looked_at
from lemonx.models.foreign import foreign
from lemonx.planning.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FOLDER = "or expand its folder: lemonx.expand(folder, output)"


def unwrapped(model: Any) -> PreTrainedModel:
    """The model inside the wrappers of torch.compile and of data parallelism; Refused unless it is whole and plain."""
    from transformers import PreTrainedModel

    replicas = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while (compiled := type(model).__name__ == "OptimizedModule") or isinstance(model, replicas):
        model = model._orig_mod if compiled else model.module
    if getattr(model, "_hf_peft_config_loaded", False) or any(
        type(module).__module__.partition(".")[0] == "peft" for module in (model, *_modules(model))
    ):
        raise Refused("the model has adapters of PEFT", "merge them first, with merge_and_unload()")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in _modules(model)):
        raise _sharded()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expand takes a folder or a model of transformers, not a {type(model).__name__}")
    _check_plain(model)
    return model


def _modules(model: Any) -> Iterable[Any]:
    return model.modules() if isinstance(model, torch.nn.Module) else ()


def _sharded() -> Refused:
    return Refused(
        "the model is sharded over processes, each of which holds only a part",
        "expand the folder it came from, or fill a sharded model of the target's sizes with lemonx.fsdp.load_expanded",
    )


def _check_plain(model: PreTrainedModel) -> None:
    if getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise Refused("the model is quantised", f"call model.dequantize() first, {_FOLDER}")
    if any("_hf_hook" in vars(module) for module in model.modules()):
        raise Refused("the model is spread over devices by accelerate", f"load it without device_map, {_FOLDER}")
    names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        if type(tensor.data).__name__ == "DTensor":
            raise _sharded()
        if type(tensor.data) is not torch.Tensor:
            raise Refused(f"{name} is a {type(tensor.data).__name__}, not a plain tensor", "dequantise the model first")
        if tensor.is_meta:
            raise Refused(f"{name} is on the meta device and has no numbers", "load the model's weights first")
        first = names.setdefault(id(tensor), name)
        if first != name and not {first, name} & (model.all_tied_weights_keys or {}).keys():
            raise Refused(
                f"{first} and {name} are one tensor, but the config does not tie them",
                "set tie_word_embeddings to True, or clone one of them",
            )


def opened(model: PreTrainedModel, folder: Path, *, verify: bool) -> Checkpoint:
    """The model as a checkpoint of a class that transformers has; only its settings are written, into `folder`.

    The model itself is not changed.
    """
    known = known_class(model)
    if verify:
        require_known_forward(model)
    config = model.config
    try:
        model.config = copy.deepcopy(config)  # save_pretrained writes into it
        # Among several processes transformers lets only the first one save, but this folder is the process's own.
        vars(model)["should_save_on_this_rank"] = lambda is_main_process: True
        with foreign(f"save this {type(model).__name__}", "make save_pretrained work first"):
            model.save_pretrained(folder, state_dict={})
            weights = _weights(model)
    finally:
        model.config = config
        vars(model).pop("should_save_on_this_rank", None)
    if known is not type(model):
        content = parse_json(read_inside(folder, CONFIG))
        write_whole(folder / CONFIG, json.dumps({**content, "architectures": [known.__name__]}))
    return _held(folder, weights)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """What save_pretrained would write, by the names it would write; where it can be, these are the model's tensors."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    left_out = model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    stored = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    return {name: stored[name].cpu().contiguous() for name in sorted(stored)}


def written(folder: Path, plan: Plan, beside: Mapping[str, Carried], weights: Mapping[str, torch.Tensor]) -> Checkpoint:
    """The target of a plan with its weights in memory; only its settings are written, into `folder`."""
    new_folder(folder)
    for name, content in {CONFIG: config_text(plan.target_config), **beside}.items():
        if isinstance(content, str):
            write_whole(folder / name, content)
        else:
            with content() as file:
                write_whole(folder / name, file)
    return _held(folder, weights)


def _held(folder: Path, weights: Mapping[str, torch.Tensor]) -> Checkpoint:
    store = InMemory(parse_config(read_inside(folder, CONFIG), folder / CONFIG), weights, folder)
    return Checkpoint(store, folder, beside=folder)


def require_known_forward(model: PreTrainedModel) -> None:
    """Refused if a derived class computes something else than the class that transformers has."""
    known = known_class(model)
    if type(model).forward is not known.forward:
        raise Refused(
            f"{type(model).__name__} has its own forward, which verification does not run",
            f"expand it with verify=False if it computes what {known.__name__} does",
        )


def known_class(model: PreTrainedModel) -> Any:
    """The model's class, or the first that it is derived from, that can be built from a name in config.json."""
    from transformers import PreTrainedModel

    for known in type(model).__mro__:
        if known is PreTrainedModel:
            break
        if door.class_named(known.__name__) is known:
            return known
    raise Refused(
        f"{type(model).__name__} is neither a class of transformers nor derived from one, so lemonx does not "
        "know what it computes",
        "expand a model of a transformers class",
    )


def load_like(model: PreTrainedModel, target: Checkpoint, plan: Plan) -> PreTrainedModel:
    """The expanded model of a checkpoint, with all properties other than its weights as in `model`."""
    dtypes = {torch_dtype(step.dtype) for step in plan.steps}
    name = type(model).__name__
    options = {"dtype": _widest(dtypes), **_implementations(model)}
    with foreign(f"load the expanded {name}", "expand a folder instead of a model", Refused):
        result: Any = door.load(target, type(model), door.read_config(target), **options)[0]
    restore(model, result, plan)
    result.config.architectures = model.config.architectures
    result.config.dtype = result.dtype
    result.config._name_or_path = model.config._name_or_path
    result.name_or_path = model.name_or_path
    return result.to(model.device)


def restore(model: PreTrainedModel, result: PreTrainedModel, plan: Plan) -> None:
    """Give the expanded model what no checkpoint holds: dtypes, what is trained, modes, and how it generates.

    Generation settings are the model's own, of which a file may lose a part; references to blocks are the target's.
    """
    _restore_parameters(model, result, plan)
    _restore_modules(model, result, plan)
    if model.can_generate():
        result.generation_config = copy.deepcopy(model.generation_config)
        pointers = {field: getattr(model.generation_config, field, None) for field in plan.source_spec.pointers}
        for field, value in pointing(pointers, plan).items():
            setattr(result.generation_config, field, value)


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype that holds every number of these."""
    return reduce(torch.promote_types, (dtype for dtype in dtypes if dtype.is_floating_point))


def _implementations(model: PreTrainedModel) -> dict[str, str | dict[str, str]]:
    """How attention and experts are computed, as from_pretrained takes it; each part of a config may have its own."""
    found: dict[str, str | dict[str, str]] = {}
    for option in ("attn_implementation", "experts_implementation"):
        parts = {"": model.config, **{name: getattr(model.config, name, None) for name in model.config.sub_configs}}
        values = {name: getattr(part, f"_{option}", None) for name, part in parts.items()}
        values = {name: value for name, value in values.items() if value is not None}
        if values:
            found[option] = values if model.config.sub_configs else values[""]
    return found


def _restore_parameters(model: PreTrainedModel, result: PreTrainedModel, plan: Plan) -> None:
    """Give every parameter the dtype in the plan, and train it if its source parameter is trained.

    Words and numbers that were set on a source parameter (`weight.no_decay = True`) are set on what comes from it.
    """
    own, steps = dict(model.named_parameters()), {step.name: step for step in plan.steps}
    for name, (disks, origins) in _origins(model, result, plan).items():
        parameter = result.get_parameter(name)
        parameter.data = parameter.data.to(_widest(torch_dtype(steps[disk].dtype) for disk in disks))
        parameter.requires_grad_(any(own[origin].requires_grad for origin in origins) or not origins)
        for origin in origins[:1]:
            vars(parameter).update({key: value for key, value in vars(own[origin]).items() if _is_word(value)})
    dtypes = {_starred(name): buffer.dtype for name, buffer in model.named_buffers()}
    for name, buffer in result.named_buffers():
        buffer.data = buffer.data.to(dtypes.get(_starred(name), buffer.dtype))


def _is_word(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _origins(model: PreTrainedModel, result: PreTrainedModel, plan: Plan) -> dict[str, tuple[list[str], list[str]]]:
    """By name of every parameter that the plan makes: its tensors on disk, and the parameters that they come from."""
    sources = {step.name: step.source for step in plan.steps}
    holders: dict[str, list[str]] = {}
    for name, disks in held_in(model).items():
        for disk in disks:
            holders.setdefault(disk, []).append(name)
    found = {name: [disk for disk in disks if disk in sources] for name, disks in held_in(result).items()}
    return {
        name: (disks, [own for disk in disks for own in holders.get(sources[disk], ())])
        for name, disks in found.items()
        if disks
    }


def _restore_modules(model: PreTrainedModel, result: PreTrainedModel, plan: Plan) -> None:
    """Restore training mode and dropout, module by module, and gradient checkpointing.

    A module is what the module is that its parameters come from: a block that is added behind a frozen one is as still.
    """
    own, places = dict(model.named_modules()), {"": ""}
    built = dict(looked_at(plan.source_config).named_modules())
    for name, (_, origins) in _origins(model, result, plan).items():
        here, there = name, origins[0] if origins else ""
        while "." in here and _starred(here) == _starred(there):
            here, there = here.rpartition(".")[0], there.rpartition(".")[0]
            places.setdefault(here, there)
    for name, module in result.named_modules():
        if name not in places:
            above, _, last = name.rpartition(".")
            places[name] = f"{places[above]}.{last}" if places[above] else last
        like = own.get(places[name], model)
        module.training = like.training
        if bare_class(like) is type(module):
            vars(module).update(_changed_rates(like, built.get(places[name])))
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if checkpointed:
        how = getattr(checkpointed[0], "_gradient_checkpointing_func", None)
        result.gradient_checkpointing_enable(getattr(how, "keywords", None))


def _changed_rates(module: torch.nn.Module, built: torch.nn.Module | None) -> dict[str, object]:
    """The rates of dropout of a module that are not those of its config, which may give each block its own."""
    made = plain_attributes(built) if built is not None else {}
    rates = {key: value for key, value in plain_attributes(module).items() if is_rate(module, key)}
    return {key: value for key, value in rates.items() if not (key in made and same(value, made[key]))}


def _starred(name: str) -> str:
    """A name with `*` for every index, since there may be more blocks than before."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
