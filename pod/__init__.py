"""Parts of every pod, for any role: engine, transfer node, index entry, metrics, health and life cycle."""
