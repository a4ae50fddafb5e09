"""What was found of a LoRA adapter that was grown along with its base."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lemonx.checkpoints.plain import JsonValue
from lemonx.verification.algebra import Algebra
from lemonx.verification.comparison import Comparison


@dataclass(frozen=True)
class GrownAdapter:
    """An adapter that was grown along, and what was measured.

    `modules` have an A and a B; `replaced` tensors are there in full. `algebra`: every entry of its tensors; `outputs`:
    the base with its adapter against the grown base with the grown one; None where they were not compared.
    """

    name: str
    folder: str
    modules: int
    replaced: int
    algebra: Algebra | None
    outputs: Comparison | None

    @property
    def passed(self) -> bool:
        return all(part is None or part.passed for part in (self.algebra, self.outputs))

    def reason(self) -> str:
        failed = [part for part in (self.algebra, self.outputs) if part is not None and not part.passed]
        return f"with the adapter {self.name!r}, {failed[0].reason()}" if failed else ""

    def as_dict(self) -> dict[str, JsonValue]:
        return {
            **{key: value for key, value in asdict(self).items() if key not in ("algebra", "outputs")},
            "algebra": self.algebra.as_dict() if self.algebra else None,
            "outputs": self.outputs.as_dict() if self.outputs else None,
        }
