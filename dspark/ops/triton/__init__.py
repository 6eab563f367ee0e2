"""Triton kernels, one operation a file. The operation's definition and its torch reference are in ``dspark.ops``.

Importing a kernel imports triton; nothing here is imported before a kernel was chosen (:mod:`dspark.ops.dispatch`).
"""
