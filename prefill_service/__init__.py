"""The prefill pod computes prompts in chunks and pushes their KV to decode pods."""
