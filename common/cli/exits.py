"""Exit codes: 0 fine, 1 something failed or is missing, 2 wrong usage or configuration (one readable line on stderr), 3
a pod's KV pool stays quarantined, 4 a pod lost one of its threads (pod/watch.py); after 3 and 4 a restart helps.
"""

FAILED, USAGE, INTERRUPTED = 1, 2, 130
