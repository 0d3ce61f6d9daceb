"""The public gRPC API (proto/inference.proto). Its messages become the same checked requests as REST bodies."""
