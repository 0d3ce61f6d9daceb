"""For processes that start others: `python -m common.cli` needs no script in PATH."""

from common.cli import main

if __name__ == "__main__":
    main()
