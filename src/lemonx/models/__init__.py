"""Models by way of transformers: building, loading, names on disk; and classes that transformers does not have."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from lemonx.guards.others import without_extras

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@cache
def _classes() -> tuple[tuple[Any, type[PreTrainedModel]], ...]:
    """Every model class of this package, with the Auto class that builds it."""
    import transformers as hf
    from transformers.utils.import_utils import is_scipy_available

    # The first import of transformers' models, which brings all that they have in common. It remembers what it found:
    # models that compute with scipy must find it again.
    is_scipy_available.cache_clear()
    with without_extras():
        from lemonx.models import pre_ln_bert, resnet, timm
    is_scipy_available.cache_clear()

    return (
        (hf.AutoModelForImageClassification, resnet.TorchvisionResNetForImageClassification),
        (hf.AutoModelForImageClassification, timm.TimmResNetForImageClassification),
        (hf.AutoModelForImageClassification, timm.TimmViTForImageClassification),
        (hf.AutoModel, pre_ln_bert.PreLnBertModel),
        (hf.AutoModelForMaskedLM, pre_ln_bert.PreLnBertForMaskedLM),
        (hf.AutoModelForSequenceClassification, pre_ln_bert.PreLnBertForSequenceClassification),
    )


def register() -> None:
    """Register the classes of this package with transformers' Auto classes; calling it again changes nothing."""
    from transformers import AutoConfig

    for auto, model in _classes():
        config: Any = model.config_class
        AutoConfig.register(config.model_type, config, exist_ok=True)
        auto.register(config, model, exist_ok=True)


def find(name: str) -> type[PreTrainedModel] | None:
    """The class of this package that config.json calls `name`, if it is one."""
    return next((model for _, model in _classes() if model.__name__ == name), None)
