"""Tool calls: how models write them, how their text is parsed, and how grammars enforce them.

To add a tool format: describe it by a MarkedFormat in known_formats.py, with its signs and the address of the vendor's
template or document, and put the template under tests/data/chat_templates. A format that cannot be described so is a
class with the protocol `ToolFormat` (format.py), listed in `all_formats` (choose.py). Then add its name to TOOL_PARSERS
(common/settings/kinds.py), a row to tests/rigs/tool_formats.py, and a row to the table in docs/tools.md.
"""
