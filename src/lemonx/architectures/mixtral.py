"""Mixtral, Qwen3-MoE; and what becomes one of them: Llama and Mistral, Qwen3."""

from functools import partial

from lemonx.architectures.llama import DEFAULTS, LAYER, QK_NORMS, SIZES, decoder
from lemonx.checkpoints.config import class_names
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import Refused
from lemonx.specs.config import Config
from lemonx.specs.family import Dense, architecture
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, circ, experts
from lemonx.specs.spec import Spec
from lemonx.specs.weights import linear, router

EXPERTS = ("num_local_experts", "num_experts_per_tok")
ALIASES = {"num_experts": "num_local_experts"}
MIXTRAL = DEFAULTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
QWEN3 = DEFAULTS | {"num_key_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}


def one_expert(c: Config, **fields: JsonValue) -> dict[str, JsonValue]:
    """The config of a dense model as one with a single expert; what the two classes have other defaults for is said."""
    old = {"attention_bias", "mlp_bias", "pretraining_tp", "layer_types", "max_window_layers", "use_sliding_window"}
    if c.maybe("mlp_bias"):
        raise Refused(
            "this model cannot become a mixture of experts, as its MLP has biases and experts have none",
            "leave model_type out",
        )
    rope = c.maybe("rope_parameters") or {}
    theta = rope.get("rope_theta") or c.maybe("rope_theta") or 10000.0
    kept = {name: value for name, value in c.values_on_disk.items() if name not in old}
    said = {name: c[name] for name in ("tie_word_embeddings", "rms_norm_eps")}
    return kept | said | {
        "num_key_value_heads": c["num_key_value_heads"] or c["num_attention_heads"],
        "head_dim": c["head_dim"] or c["hidden_size"] // c["num_attention_heads"],
        **({"rope_parameters": {**rope, "rope_theta": theta}} if rope else {"rope_theta": theta}),
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        **fields,
    }  # fmt: skip


def renamed(c: Config, old: str, new: str) -> list[str]:
    """The classes of a config, in another family."""
    return [name.replace(old, new, 1) for name in class_names(c.values_on_disk)]


def _mixtral(c: Config, old: str, window: JsonValue) -> dict[str, JsonValue]:
    if c.maybe("attention_bias"):
        raise Refused(
            "this model cannot become a Mixtral, as its attention has biases and Mixtral's has none",
            "leave model_type out",
        )
    window = c.values_on_disk.get("sliding_window", window)
    return one_expert(c, model_type="mixtral", architectures=renamed(c, old, "Mixtral"), sliding_window=window)


def _qwen3_moe(c: Config) -> dict[str, JsonValue]:
    if c.maybe("use_sliding_window"):
        raise Refused(
            "this model cannot become a Qwen3-MoE, as some of its layers have their own attention window",
            "leave model_type out",
        )
    fields = {"model_type": "qwen3_moe", "norm_topk_prob": True, "moe_intermediate_size": c["intermediate_size"],
              "attention_bias": bool(c.maybe("attention_bias")), "sliding_window": None}  # fmt: skip
    return one_expert(c, architectures=renamed(c, "Qwen3", "Qwen3Moe"), **fields)


FUSED = {f".mlp.{old}_proj.": f".block_sparse_moe.experts.0.{new}."
         for old, new in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}  # fmt: skip
TO_MIXTRAL = {
    "llama": Dense(partial(_mixtral, old="Llama", window=None), FUSED),
    "mistral": Dense(partial(_mixtral, old="Mistral", window=4096), FUSED),
}
TO_QWEN3 = {"qwen3": Dense(_qwen3_moe, {".mlp.": ".mlp.experts.0."})}


@architecture("mixtral", **SIZES, experts=EXPERTS, kind="language", defaults=MIXTRAL, dense=TO_MIXTRAL, aliases=ALIASES)
def mixtral(c: Config) -> Spec:
    """Mixtral: Mistral with several MLPs, of which a router chooses."""
    spaces = {"experts": experts(c["num_local_experts"], c["num_experts_per_tok"], renormalised=True),
              "hidden": circ(c["intermediate_size"], within="experts")}  # fmt: skip
    return decoder(c, mlp=moe(f"{LAYER}.block_sparse_moe", "w1", "w3", "w2", one=_one(spaces)), spaces=spaces)


@architecture(
    "qwen3_moe", **{**SIZES, "ffn": "moe_intermediate_size"}, experts=EXPERTS, kind="language", defaults=QWEN3,
    dense=TO_QWEN3, aliases=ALIASES,
)  # fmt: skip
def qwen3_moe(c: Config) -> Spec:
    """Qwen3-MoE: Qwen3 with several MLPs, of which a router chooses."""
    if c["mlp_only_layers"] or c["decoder_sparse_step"] != 1:
        raise Refused(
            "decoder_sparse_step or mlp_only_layers leaves layers without experts, which lemonx does not support",
            "expand a model where every layer has experts",
        )
    size, renormalised = c["num_local_experts"], bool(c.maybe("norm_topk_prob"))
    spaces = {"experts": experts(size, c["num_experts_per_tok"], renormalised=renormalised),
              "hidden": circ(c["moe_intermediate_size"], within="experts")}  # fmt: skip
    return decoder(c, qk_norms=QK_NORMS, mlp=moe(f"{LAYER}.mlp", one=_one(spaces)), spaces=spaces)


def _one(spaces: dict[str, Space]) -> bool:
    return spaces["experts"].size == 1


def moe(
    module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", one: bool = False
) -> dict[str, Row]:
    """A router, and a gated MLP for every expert; a router that has `one` to choose from may be missing."""
    return {
        f"{module}.gate": router("normed -> experts", optional=one),
        f"{module}.experts.{{experts}}.{gate}": linear("normed -> hidden"),
        f"{module}.experts.{{experts}}.{up}": linear("normed -> hidden"),
        f"{module}.experts.{{experts}}.{down}": linear("hidden -> residual"),
    }
