"""A drafter for dspark: a suffix automaton over each request's prompt and output, with counts."""
