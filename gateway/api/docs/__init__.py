"""The description of the REST API, from which /openapi.json and the tables of docs/api.md are made."""
