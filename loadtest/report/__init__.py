"""Results of load tests: figures, comparison of two runs, JSON files, terminal tables and HTML pages."""
