"""``python -m zerotune`` is the same command line as ``zerotune``."""

from zerotune.cli.main import main

if __name__ == "__main__":
    main()
