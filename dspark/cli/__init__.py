"""The ``dspark`` command. Thin: it reads options, calls the library and prints."""
