"""The demo of `baton up`: its model, and one answer with the time that each phase took."""
