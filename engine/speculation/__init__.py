"""Speculative decoding: cheap guesses of the next tokens, verified by the model in the step that it takes anyway."""
