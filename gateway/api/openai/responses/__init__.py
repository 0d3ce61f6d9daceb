"""/v1/responses: a chat in the shape of OpenAI's Responses API, with typed events and, in Redis, a memory."""
