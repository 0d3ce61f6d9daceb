"""Which sequences compute how many tokens in each step, and the life of a step from its plan to its result.

No module imports torch at run time: the simulator uses them too.
"""
