"""One rule for every family of ATen operations: which axes it makes one, and what it needs of them."""

from importlib import import_module

ROOMS = ("pointwise", "views", "products", "norms", "lookups", "reductions", "pieces")


def register() -> None:
    """Import every file of rules; each registers its own."""
    for room in ROOMS:
        import_module(f"lemonx.tracing.rules.{room}")
