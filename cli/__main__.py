"""For processes that start others: `python -m cli` needs no script in PATH."""

from cli import main

if __name__ == "__main__":
    main()
