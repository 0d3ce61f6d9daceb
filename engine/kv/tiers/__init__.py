"""Colder tiers of KV blocks: host memory and disk, their copies, and the files of segments."""
