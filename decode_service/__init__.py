"""The decode pod reserves blocks, receives KV and decodes with continuous batching."""
