"""A survey of every model type of the installed transformers: which are built tiny, run, and grown, and how exactly."""
