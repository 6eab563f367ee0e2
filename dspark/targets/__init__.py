"""Targets: the models whose law is decoded."""
