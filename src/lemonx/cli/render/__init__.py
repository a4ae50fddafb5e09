"""Prints tables, progress and results; one module per group of commands."""
