"""Whole jobs: plan, expand and verify, from a folder or a model to a result; `lemonx.api` has the signatures."""
