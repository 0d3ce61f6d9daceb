"""One process and its children: life cycle, death with the parent, channels between ranks, atomic files."""
