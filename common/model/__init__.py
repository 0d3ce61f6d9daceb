"""The model directory: where it lies, the files that it needs, its chat template."""
