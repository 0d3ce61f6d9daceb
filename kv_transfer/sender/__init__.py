"""The sending side of transfers: one state machine per transfer, their table, and loans of cached blocks."""
