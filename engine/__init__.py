"""The engine: models, paged KV, scheduler and sampler. It imports no grpc, redis, nixl or starlette."""

import os

# OpenMP reads this once, when torch is loaded. By default its threads spin at barriers. With several pods on the same
# cores a step then takes seconds instead of milliseconds, because spinning threads keep the late thread from running.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
