"""Clients that send load over REST or gRPC and record when each token arrives."""
