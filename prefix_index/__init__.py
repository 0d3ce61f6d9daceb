"""The prefix index in Redis: pods publish the hashes of their cached blocks, gateways look up prompts and book load."""
