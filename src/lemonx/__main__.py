"""`python -m lemonx` is `lemonx`: what torchrun starts."""

from lemonx.cli import main

main()
