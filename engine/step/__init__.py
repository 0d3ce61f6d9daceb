"""Runs one step of the engine: inputs, layers, sampling, CUDA graphs, and the warm-up before the first step."""
