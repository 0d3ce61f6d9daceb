"""A cluster on a virtual clock: the real router, scheduler and block cache, with models of step times and prefix index.

It answers what no test machine can: how a routing policy does on a recorded trace with 8 or 1,024 pods, and which
prefill:decode ratio a workload wants (`baton plan`). Never torch: what it shares with the engine is torch-free.
"""
