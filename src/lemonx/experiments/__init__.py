"""The paper's experiments: train a source, make the target by each method, train each on, compare."""
