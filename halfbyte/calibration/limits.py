"""How much is computed at once. Fixed numbers, so that results never depend on the memory at hand.

Free of torch, since the plan predicts memory and time from them.
"""

BATCH_TOKENS = 8192
"""Tokens per forward call."""

EXPERT_TOKENS = 131_072
"""Tokens that are sent through all experts of a layer before the next ones."""

MOMENT_TOKENS = {"cpu": 8192, "cuda": 32_768}
"""Tokens whose second moment is one matrix product."""

SCORES_AT_ONCE = 1 << 25
"""Elements of a block of sparse attention's indexer scores, float32."""

HELD_OUT_STRIDE = 32
"""One token in so many is kept out of all statistics, to check their results on."""

HELD_OUT_TOKENS = 256
"""Held-out tokens that one input is checked on, at most."""

SAMPLE = 8
"""Tokens per input feature by which the layer's mean is estimated for a down projection."""

GRID = 20
"""Exponents that a search for AWQ's scales tries: 0, 1/20, ..., 19/20."""

READERS_IN_SEARCH = 32
"""Routed experts that a search for the scales of their norm looks at."""
