"""A stack on one machine (`baton up`): its processes, their supervision and display."""
