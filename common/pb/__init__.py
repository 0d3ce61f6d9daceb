"""gRPC stubs generated from proto/ by `make proto`; never edited."""
