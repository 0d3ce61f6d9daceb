"""The public APIs: REST in OpenAI's shape, and gRPC. Bodies and messages become the checked requests of
`gateway.serving`.
"""
