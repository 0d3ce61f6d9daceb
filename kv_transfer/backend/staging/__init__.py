"""Writes through host memory: the staging area, the messages, and the two ends, of the writer and the receiver."""
