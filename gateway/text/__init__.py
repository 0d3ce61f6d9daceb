"""Text: tokenizers, chat templates, and the parsing of generated text into content, reasoning and tool calls."""
