"""The requests of a load test: prompts, lengths, arrival times, synthetic sessions and recorded traces."""
