"""KV of models whose layers keep different things: windows of tokens, and recurrent states."""
