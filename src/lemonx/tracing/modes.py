"""The base of lemonx's own modes of torch."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A dispatch mode that does not import torch's compiler, which takes two seconds and compiles nothing here."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
