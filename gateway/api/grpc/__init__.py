"""The public gRPC API (proto/baton/v1/inference.proto). Its messages become the requests of the REST API."""
