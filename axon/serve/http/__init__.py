"""The OpenAI-compatible server: HTTP in front of an engine."""
