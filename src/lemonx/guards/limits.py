"""Limits for numbers that are read from a file or an option: above every real model, below what fills the memory.

Above its limit, a number is refused in one line and within seconds, before anything is counted or built by it.
"""

from __future__ import annotations

# Entries of an axis, and of a product of axes: a vocabulary of a million, a fused query, key and value.
LARGEST, LARGEST_PRODUCT = 2**20, 2**21
# Blocks of a stack. There are models with a thousand.
MOST_BLOCKS = 2**12
# Experts and labels. ImageNet-21k has 21,843 labels, and names each of them twice.
MOST_LABELS, MOST_ENTRIES = 2**18, 60_000
# Tensors of a checkpoint: the largest known has 92,000, and as many scales where it is quantised. Of a target: 94
# blocks with 128 experts each have 37,000.
MOST_TENSORS, MOST_TARGET_TENSORS = 200_000, 100_000
# Findings that are listed one by one.
MOST_FINDINGS = 1000
# Steps of a run, examples of a step, examples that are made up, tokens of an example, and the side of a picture.
MOST_STEPS, MOST_AT_ONCE, MOST_EXAMPLES, LONGEST_TEXT, LARGEST_PICTURE = 10**9, 2**16, 2 * 10**6, 2**20, 2048
# Numbers that a model keeps beside its weights, masks and angles, and pixels of a picture it is verified with.
MOST_BUFFERS, MOST_PIXELS = 2**26, 2**21
# A seed of an expansion, of either sign, and of a run, where numpy's is the smallest.
LARGEST_SEED, LARGEST_RUN_SEED = 2**63 - 1, 2**32 - 1
# How many times its size a compressed file of data may grow to, and what it may grow to in any case. MNIST grows
# fivefold; deflate's most is 1,032.
MOST_INFLATION, INFLATED = 40, 2**24
