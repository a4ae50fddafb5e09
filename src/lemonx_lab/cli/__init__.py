"""The commands of the laboratory, which register with lemonx's application."""

# isort: off
from lemonx_lab.cli import training, experiments, methods, survey  # noqa: F401

# isort: on
