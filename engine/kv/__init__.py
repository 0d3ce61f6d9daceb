"""The KV memory of a pod: blocks, leases, the prefix cache and its second tier in host memory."""
