"""The settings with which models are run for measurements: ours, whatever the files say."""

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
    """The config object, changed so that the model, and its parts, return only their own outputs in the usual form.

    It also gets a padding token, without which classifiers of decoders accept only one text at a time.
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
    """Greedy generation of the same number of tokens for every model, without an end token; set on the model itself."""
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
