"""A cluster on a virtual clock: the gateway's routing and the engine's scheduler and block cache, with modelled times.

It compares routing policies on recorded traces with up to 1,024 pods, and finds the prefill:decode ratio of a workload
(`baton plan`). Never loads torch.
"""
