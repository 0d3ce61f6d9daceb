"""Where a request goes: the policy and what it looks at, and the router that gathers that.

demand, view, inflight and policy know neither the event loop, nor a network, nor the clock: time is an argument. So the
simulator runs the same code as the gateway.
"""
