"""Checks that a target computes the source's function: its files, its structure, and its outputs once loaded again."""
