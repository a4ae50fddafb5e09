"""Training on: the recipe, on transformers' Trainer."""
