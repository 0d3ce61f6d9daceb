"""The gateway: OpenAI REST and public gRPC, validation, routing. Never torch."""
