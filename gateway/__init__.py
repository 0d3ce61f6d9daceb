"""The gateway: takes OpenAI REST and gRPC requests, routes them to pods and streams the answers. Never loads torch."""
