"""Mixtral, Qwen3-MoE."""

from lemonx.architectures.llama import DEFAULTS, LAYER, QK_NORMS, SIZES, decoder
from lemonx.errors import Refused
from lemonx.modules import Row, linear, router
from lemonx.spec import Config, Spec, architecture
from lemonx.vectors import circ, experts

EXPERTS = ("num_local_experts", "num_experts_per_tok")
MIXTRAL = DEFAULTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
QWEN3 = DEFAULTS | {"num_key_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}


@architecture("mixtral", **SIZES, experts=EXPERTS, free="language", defaults=MIXTRAL)
def mixtral(c: Config) -> Spec:
    """Mixtral: Mistral with several MLPs, of which a router chooses."""
    spaces = {"experts": experts(c["num_local_experts"], c["num_experts_per_tok"], renormalised=True),
              "hidden": circ(c["intermediate_size"])}  # fmt: skip
    return decoder(c, mlp=moe(f"{LAYER}.block_sparse_moe", "w1", "w3", "w2"), spaces=spaces)


@architecture(
    "qwen3_moe", **{**SIZES, "ffn": "moe_intermediate_size"}, experts=EXPERTS, free="language", defaults=QWEN3
)
def qwen3_moe(c: Config) -> Spec:
    """Qwen3-MoE: Qwen3 with several MLPs, of which a router chooses."""
    if c["mlp_only_layers"] or c["decoder_sparse_step"] != 1:
        raise Refused("some layers of this Qwen3-MoE have no experts, and its spec knows only layers that do")
    size, renormalised = c.either("num_experts", "num_local_experts"), bool(c.maybe("norm_topk_prob"))
    spaces = {"experts": experts(size, c["num_experts_per_tok"], renormalised=renormalised),
              "hidden": circ(c["moe_intermediate_size"])}  # fmt: skip
    return decoder(c, qk_norms=QK_NORMS, mlp=moe(f"{LAYER}.mlp"), spaces=spaces)


def moe(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, Row]:
    """A router, and a gated MLP for every expert."""
    return {
        f"{module}.gate": router("normed -> experts"),
        f"{module}.experts.{{experts}}.{gate}": linear("normed -> hidden"),
        f"{module}.experts.{{experts}}.{up}": linear("normed -> hidden"),
        f"{module}.experts.{{experts}}.{down}": linear("hidden -> residual"),
    }
