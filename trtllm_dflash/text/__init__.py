"""Text to tokens and back: tokenizers, chat formats, text that arrives token by token."""
