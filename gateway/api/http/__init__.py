"""HTTP below the endpoints: the bounded protocol, authentication, request bodies, JSON fields and errors."""
