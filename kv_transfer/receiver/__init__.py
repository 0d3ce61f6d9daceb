"""The receiving side of transfers: one state machine per transfer, their table, and pulls of cached prefixes."""
