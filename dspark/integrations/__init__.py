"""Bridges to other serving engines."""
