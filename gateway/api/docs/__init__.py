"""What the API accepts and answers, as data: /openapi.json and the tables of docs/api.md are made from it."""
