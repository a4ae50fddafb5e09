"""Specs inferred from a run of the model: which axes of which parameters are one space, and what becomes of them."""
