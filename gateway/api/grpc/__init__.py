"""The public gRPC API (proto/baton/v1/inference.proto). Its messages become the same checked requests as REST bodies."""
