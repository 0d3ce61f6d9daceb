"""JSON schemas as clients write them: places in them, what makes them ready for llguidance, and refusals in words."""
