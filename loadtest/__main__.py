"""`python -m loadtest ...` is `baton loadtest ...`."""

import sys

from cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "loadtest")
    main()
