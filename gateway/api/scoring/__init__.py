"""The routes that score texts against each other: /v1/rerank and /v1/score."""
