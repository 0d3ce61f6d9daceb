"""The prefill pod: computes prompts in chunks and streams their KV to decode pods."""
