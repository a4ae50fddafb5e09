"""Tables for model types that have none: inferred by running transformers' own class without its weights."""
