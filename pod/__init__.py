"""What every pod is made of, whatever its role: an engine, a transfer node, an index entry and a life."""
