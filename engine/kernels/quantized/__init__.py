"""Products with quantised weights: the layout on a GPU, the kernels, and the choice of a kernel."""
