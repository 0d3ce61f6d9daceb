"""`python -m loadtest ...` is `baton loadtest ...`."""

import sys

from common.cli import main

sys.argv.insert(1, "loadtest")
main()
