"""How a model is run to be measured: by settings of ours, whatever its files ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

NEW_TOKENS = 8
# Outputs by name, and none besides those that a model computes anyway; all tokens at once, however many there are.
_OUTPUTS = {
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "output_router_logits": False,
    "chunk_size_feed_forward": 0,
}


def with_plain_outputs(config: Any) -> Any:
    """The config object, which now asks for a model's own outputs and in the usual form; its parts too.

    And it names a token for padding, without which classifiers of decoders take no more than one text.
    """
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in (config, *(part for part in parts if part is not None)):
        for name, value in _OUTPUTS.items():
            if hasattr(part, name):
                setattr(part, name, value)
        if getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 0
    return config


def generation_settings(model: PreTrainedModel) -> GenerationConfig:
    """Greedy, as many tokens for every model, no end of the text: set on the model, so that nothing is inherited."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=NEW_TOKENS,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        decoder_start_token_id=0 if model.config.is_encoder_decoder else None,
    )
    # generate() fills what is not set here from the model's own, which its folder may have brought.
    model.generation_config = settings
    return settings
