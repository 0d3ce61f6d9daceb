"""The decode pod: reserves, receives KV, batches continuously."""
