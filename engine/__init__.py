"""Paged KV, models, scheduler, sampler. Never grpc, redis, nixl or fastapi."""
