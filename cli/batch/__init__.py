"""The work of `baton batch`: reads a file of requests and writes a file of answers, in OpenAI's batch format."""
