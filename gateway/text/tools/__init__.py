"""Tool calls: how models write them, how their text is parsed, and how grammars enforce them."""
