"""JSON schemas of clients: places in them, their adaption to llguidance, and the words of refusals."""
