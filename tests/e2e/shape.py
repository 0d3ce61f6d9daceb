"""The shape of the clusters that the end-to-end tests start."""

CHUNK, BLOCK, MAX_MODEL_LEN = 128, 16, 1536
SPANS = "spans.jsonl"  # in the log directory
