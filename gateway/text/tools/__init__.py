"""Tool calls: how models write them, how their text is parsed, and how grammars enforce them.

To add a tool format: write a class with the protocol `ToolFormat` (format.py) in a new file, return it from
`choose_tool_format` and recognise its models in `_guess` (choose.py). Then add its name to TOOL_PARSERS
(common/settings/kinds.py) and to the table in docs/api.md.
"""
