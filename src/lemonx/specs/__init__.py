"""The row language: spaces, rows and specs that describe a family of models, matched to the tensors of a file."""
