"""Sampling: draws, logits processors, the draft side of a round, log-probabilities."""
