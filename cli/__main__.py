"""`python -m cli` is `baton`, for processes that start others without a script in PATH."""

from cli import main

if __name__ == "__main__":
    main()
