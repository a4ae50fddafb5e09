from typing import Any

from transformers import PreTrainedModel

def get_model_conversion_mapping(model: PreTrainedModel) -> list[Any]: ...
