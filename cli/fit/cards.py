"""The rates of a card: of known cards by name, of any machine from the file that `baton doctor --measure` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common.errors import ConfigError, describe

GB, TERA = 10**9, 1e12
#: Share of the data sheet's rates that copies and products reach: 3.01 of 3.35 TB/s and 753 of 989 TFLOP/s on an H100
#: (engine-h100.json), 4.26 of 4.8 TB/s on an H200 (engine-h200.json).
COPY_SHARE, PRODUCT_SHARE = 0.89, 0.76
ATTENTION_SHARE = 0.83  # Attention against products: 603 of 747 TFLOP/s on an H200.
FP8_GAIN = 1.4  # Rate of products of 8-bit floats against bfloat16, inputs quantised on the way.


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card, or the CPUs of a machine. Rates are reached ones, not those of a data sheet."""

    name: str
    source: str  # Where the figures come from.
    memory_bytes: int
    copy_byte_s: float  # Bytes read and written by a large copy.
    product_flop_s: float  # Large products in the model's dtype.
    attention_flop_s: float  # Causal attention over one long prompt.
    fp8_flop_s: float = 0.0  # Products of 8-bit floats; 0: the card has none.
    device: str = "cuda"

    @property
    def dtype(self) -> str:
        """The dtype that pods use by default on this card."""
        return "float32" if self.device == "cpu" else "bfloat16"


def _from_data_sheet(name: str, memory_gb: int, tb_s: float, tflop_s: float, *, fp8: bool) -> Card:
    product = tflop_s * PRODUCT_SHARE * TERA
    return Card(
        name=name,
        source=f"{COPY_SHARE:.0%} of {tb_s:g} TB/s and {PRODUCT_SHARE:.0%} of {tflop_s:g} TFLOP/s, its data sheet",
        memory_bytes=memory_gb * GB,
        copy_byte_s=tb_s * COPY_SHARE * TERA,
        product_flop_s=product,
        attention_flop_s=product * ATTENTION_SHARE,
        fp8_flop_s=product * FP8_GAIN if fp8 else 0.0,
    )


#: Cards by name. Those with `measured` in their source were measured by benchmarks/engine.py.
CARDS = {
    card.name: card
    for card in (
        Card(
            name="h200",
            source="measured (benchmarks/results/engine-h200.json)",
            memory_bytes=150_754_820_096,
            copy_byte_s=4256.6e9,
            product_flop_s=747.5e12,
            attention_flop_s=603e12,
            fp8_flop_s=747.5e12 * FP8_GAIN,
        ),
        Card(
            name="h100",
            source="measured (benchmarks/results/engine-h100.json)",
            memory_bytes=85_045_673_984,
            copy_byte_s=3009.6e9,
            product_flop_s=753e12,
            attention_flop_s=647.1e12,
            fp8_flop_s=753e12 * FP8_GAIN,
        ),
        _from_data_sheet("b200", 192, 8.0, 2250, fp8=True),
        _from_data_sheet("a100-80gb", 80, 2.04, 312, fp8=False),
        _from_data_sheet("a100-40gb", 40, 1.56, 312, fp8=False),
        _from_data_sheet("l40s", 48, 0.864, 362, fp8=True),
        _from_data_sheet("l4", 24, 0.3, 121, fp8=True),
        _from_data_sheet("a10", 24, 0.6, 125, fp8=False),
        _from_data_sheet("rtx4090", 24, 1.008, 165, fp8=True),
    )
}


def load_card(named: str) -> Card:
    """Returns a card by its name, or the card of a file of `baton doctor --measure`. Raises ConfigError."""
    if (known := CARDS.get(named.lower())) is not None:
        return known
    path = Path(named)
    if not path.is_file():
        names = ", ".join(CARDS)
        raise _error(f"{named!r} is neither {names} nor a file (baton doctor --measure FILE writes one)")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise _error(f"{path} is not readable JSON: {describe(e)}") from e
    return parse_card(raw, str(path))


def parse_card(raw: object, where: str) -> Card:
    """Returns the card of a parsed file. Raises ConfigError, which names the field."""
    if not isinstance(raw, Mapping):
        raise _error(f"{where} must hold a JSON object")
    values: dict[str, Any] = {}
    for field in fields(Card):
        value = raw.get(field.name)
        if field.name in ("name", "source", "device"):
            right = isinstance(value, str) and value in (("cuda", "cpu") if field.name == "device" else (value,))
            expected = "cuda or cpu" if field.name == "device" else "a text"
        else:
            least = 0.0 if field.name == "fp8_flop_s" else 1.0
            right = isinstance(value, int | float) and not isinstance(value, bool) and least <= value < float("inf")
            expected = "a positive number"
        if not right:
            raise _error(f"{where}: {field.name} must be {expected}, not {value!r}")
        values[field.name] = value
    if unknown := sorted(raw.keys() - values.keys()):
        raise _error(f"{where} has an unknown field {unknown[0]!r}")
    return Card(**values)


def write_card(card: Card, path: Path) -> None:
    """Writes the file that `load_card` reads."""
    path.write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")


def _error(fault: str) -> ConfigError:
    return ConfigError(f"--gpu: {fault}", field="gpu")
