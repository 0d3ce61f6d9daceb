"""Chooses the pods of a request: its hits per pod, the cost of each pod, and the bookings of the choice.

policy and local_index take the time as an argument and know no network: the simulator runs the same code.
"""
