"""OpenAI's API: its requests, replies, events and errors."""
