"""Model classes for checkpoints that transformers has no class for, imported only when asked for."""

from __future__ import annotations


def register() -> None:
    """Makes transformers' Auto classes know the classes of this package; calling it again changes nothing."""
    from transformers import AutoConfig, AutoModelForImageClassification

    from lemonx.models.resnet import TorchvisionResNetConfig, TorchvisionResNetForImageClassification

    AutoConfig.register(TorchvisionResNetConfig.model_type, TorchvisionResNetConfig, exist_ok=True)
    AutoModelForImageClassification.register(
        TorchvisionResNetConfig, TorchvisionResNetForImageClassification, exist_ok=True
    )
