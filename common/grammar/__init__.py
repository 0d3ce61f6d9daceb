"""Grammars that an answer must match: limits, the proof in a child process, compilation, matchers."""
