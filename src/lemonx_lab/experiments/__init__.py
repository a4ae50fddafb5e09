"""The paper's experiments: train a source, grow it with each method, train every result, and compare."""
