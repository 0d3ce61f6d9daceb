"""Products with LoRA adapters in slots."""
