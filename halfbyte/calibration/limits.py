"""How much is computed at once. Fixed numbers, so that results never depend on the memory at hand.

Free of torch, since the plan predicts memory from them.
"""

BATCH_TOKENS = 8192
"""Tokens per forward call."""

SCORES_AT_ONCE = 1 << 25
"""Elements of a block of sparse attention's indexer scores, float32."""
