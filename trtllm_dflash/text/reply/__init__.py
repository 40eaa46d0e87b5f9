"""Replies to conversations, taken apart into thinking, content and calls of tools; a file a way of writing them."""
