"""Runs a plan over the bytes of a checkpoint, block by block."""
