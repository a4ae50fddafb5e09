"""What an expansion is: index maps, dense matrices, recipes for a tensor. Data only: no file, no model, no torch."""
