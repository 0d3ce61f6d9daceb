"""The demo of `baton up`: its model, and one answer with the time of each phase."""
