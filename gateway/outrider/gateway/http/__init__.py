"""OpenAI's API over HTTP, metrics and the live page."""
