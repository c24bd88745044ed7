"""The server with OpenAI's API."""
