"""OpenTelemetry tracing: trace contexts, spans, and their export."""
