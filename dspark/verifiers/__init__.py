"""Verifiers: which drafts are accepted, and which token follows them. One a file."""
