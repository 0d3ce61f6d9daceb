"""The shape of the clusters that the end-to-end tests start."""

CHUNK, BLOCK, MAX_MODEL_LEN = 256, 16, 3072
SPANS = "spans.jsonl"  # in the log directory
