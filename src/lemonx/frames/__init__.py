"""Dense expansions for streams that a LayerNorm feeds, where copies alone cannot reach a width."""
