"""The endpoints in the shapes of OpenAI's and vLLM's REST APIs: parsing of bodies, and encoding of answers."""
