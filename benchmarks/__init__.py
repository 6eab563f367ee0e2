"""Figures and checks on a real model: ``python -m benchmarks.verify`` and ``python -m benchmarks.frame``."""
