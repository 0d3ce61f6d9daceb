"""A cluster on a virtual clock: the real router, index code, scheduler and block cache around modelled step times.

It answers what no test machine can: how a routing policy does on a recorded trace with 8 or 1,024 pods, and which
prefill:decode ratio a workload wants (`baton plan`). Never torch: what it shares with the engine is torch-free.
"""
