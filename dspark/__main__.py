"""``python -m dspark`` is the ``dspark`` command."""

from dspark.cli.main import main

if __name__ == "__main__":
    main()
