"""The dashboard: its page, and the JSON that the page shows. docs/dashboard-data.md describes the fields."""
