"""Verify-length schedulers that ship with dspark, one a module, and measured cost tables (``cost``, ``cache``)."""
