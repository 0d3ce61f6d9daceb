"""The plan of each step and its life until its result. The simulator uses it too, so no module imports torch."""
