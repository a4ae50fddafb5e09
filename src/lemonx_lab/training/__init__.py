"""Training runs by a recipe."""
