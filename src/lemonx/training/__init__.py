"""Training: recipes, run with transformers' Trainer."""
