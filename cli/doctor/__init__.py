"""The checks of `baton doctor`: this machine, and running pods."""
