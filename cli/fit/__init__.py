"""Whether a model fits on a card, and how fast it will be: `baton plan fit`."""
