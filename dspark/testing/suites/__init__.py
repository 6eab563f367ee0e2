"""One conformance suite a kind of component."""
