"""`baton batch`: a file of requests in, a file of answers out, in OpenAI's batch format."""
