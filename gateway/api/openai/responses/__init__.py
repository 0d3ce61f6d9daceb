"""/v1/responses: chats in the shape of OpenAI's Responses API, with typed events, and stored responses in Redis."""
