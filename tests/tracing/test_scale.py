"""A table is inferred at full size on the meta device: no weight takes memory, and it takes seconds."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lemonx.tracing.infer import infer


def _llama(hidden: int, ffn: int, heads: int, layers: int) -> LlamaForCausalLM:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers, "head_dim": 128}
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        vocab_size=32000,
        attn_implementation="eager",
        use_cache=False,
        **sizes,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval()


def test_a_7b_llama_is_inferred_without_its_weights() -> None:
    small, large = _llama(4096, 11008, 32, 32), _llama(6144, 16384, 48, 40)
    tokens = torch.zeros(3, 7, dtype=torch.long, device="meta")
    mask = torch.zeros(3, 1, 7, 7, device="meta")
    table = infer(small, large, lambda model: [model(input_ids=tokens, attention_mask=mask).logits])
    assert all(parameter.is_meta for model in (small, large) for parameter in model.parameters())
    kinds = {
        name: (space.kind, space.size, table.large.spaces[name].size) for name, space in table.small.spaces.items()
    }
    assert kinds["model_embed_tokens"] == ("zero", 4096, 6144)
    assert kinds["model_layers_mlp_gate_proj"] == ("circ", 11008, 16384)
    assert kinds["model_layers_self_attn_q_proj"] == ("circ", 32, 48)
    assert str(table.small.rows["model.layers.*.self_attn.o_proj"].writes) == "model_embed_tokens"
    stack = table.large.stacks["model.layers"]
    assert (stack.size, stack.stream, stack.still) == (40, "model_embed_tokens", "")
