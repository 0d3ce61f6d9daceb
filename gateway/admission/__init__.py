"""Who may send what, and when it is let through to the pods.

keys (who), limits (how much, shared by gateways in Redis), fair_queue and overload (when, or not at all). All of it
happens before a request's first token; nothing here is touched per token.
"""
