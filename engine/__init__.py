"""Paged KV, models, scheduler, sampler. Never grpc, redis, nixl or fastapi."""

import os

# OpenMP reads this once, when torch loads. Its default is to spin at barriers: with several pods on the same cores a
# step then takes seconds instead of milliseconds, because the spinning thread keeps the late one from running.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
