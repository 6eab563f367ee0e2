"""A sequential head for dspark: a causal convolution over the last draft tokens."""
