"""Tensors under names that a faulty release of transformers gave them in save_pretrained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from lemonx.errors import BadCheckpoint

# How the model type begins, what its wrong names have in common, and the releases that wrote them. Found by saving tiny
# models with every minor release of transformers 5. MXFP4 needs a GPU to save, so its names come from a report
# (https://github.com/p-e-w/heretic/pull/211), and so do the last ones, which remote code is needed for
# (https://github.com/huggingface/transformers/issues/46650).
_WRITTEN: tuple[tuple[str, str, str], ...] = (
    ("qwen3_5", r"\blanguage_model\.language_model\.", "5.4.0 to 5.5.1"),
    ("qwen3_5", r"\blanguage_model\.visual\.", "5.5.2 to 5.5.4"),
    ("gpt_oss", r"_blocks_(blocks|scales)$", "5.4.0 to 5.5.1"),
    ("clip", r"^(text_model\.text|vision_model\.visual)_projection\.", "5.6.0 to 5.10.1"),
    ("nomic_bert", r"^encoder\.encoder\.layers\.", "5, for code of its own,"),
    ("jina_embeddings_v3", r"^encoder\.encoder\.layers\.", "5, for code of its own,"),
)


def wrong_names(model_type: object, names: Collection[str]) -> Iterator[tuple[frozenset[str], BadCheckpoint]]:
    """The tensors of each fault that the names show, and the complaint about them."""
    for begin, pattern, releases in _WRITTEN:
        if str(model_type).startswith(begin) and (wrong := [name for name in names if re.search(pattern, name)]):
            count = f"{len(wrong)} of {len(names)} tensors" if len(wrong) > 1 else "the tensor"
            yield (
                frozenset(wrong),
                BadCheckpoint(
                    f"holds {count} under a wrong name that save_pretrained of transformers {releases} gives "
                    f"({min(wrong)!r})",
                    "save the model it was made from again, with a newer transformers",
                ),
            )
