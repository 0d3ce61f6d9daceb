"""Speculative decoding: proposes draft tokens, and verifies them in the step that would decode one token."""
