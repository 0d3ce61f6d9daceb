"""The gateway's core, shared by REST and gRPC: admission of a request, its choices, and how they become answers."""
