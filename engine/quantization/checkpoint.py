"""Reads the tensors of a quantised linear layer from a checkpoint into a `QuantizedWeight`.

Every tensor's shape and dtype is checked before its numbers are used. Files store 4-bit and 8-bit integers in 32-bit
words, the first one in the lowest bits:

    layout    weight                             zeros                               scales
    awq       qweight [K, N / 8], along N        qzeros [G, N / 8], along N          scales [G, N]
    gptq      qweight [K / 8, N], along K        qzeros [G, N / 8], along N          scales [G, N], g_idx [K]
    packed    weight_packed [N, K / 8], along K  weight_zero_point [N / 8, G], on N  weight_scale [N, G], weight_g_idx
    plain     weight [N, K]                                                          weight_scale(_inv), input_scale

Words of AWQ have the numbers in another order, see `_AWQ_ORDER`. The widths are those of 4 bits; 8-bit words hold four
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.quantization.at_load import quantize
from engine.quantization.scheme import Scheme
from engine.quantization.weight import BLOCK, QuantizedWeight, pack_nibbles

#: Position in an AWQ word of the number of each output: output 1 is the fifth number, and so on.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_POWERS = torch.float8_e8m0fnu  # Scales that are powers of two (ue8m0), of weights in FP8.
_WORDS = (torch.int32,)


class TensorFiles(Protocol):
    """The tensors of a checkpoint by name."""

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape, without reading it."""

    def read(self, name: str) -> Tensor:
        """Returns a tensor on the device of the model."""


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reads the tensors of one projection of a checkpoint, `name`, with N outputs and K inputs."""

    files: TensorFiles
    name: str
    outputs: int
    inputs: int
    scheme: Scheme

    def weight(self) -> QuantizedWeight:
        """Returns the weight. Raises ConfigError, which names the tensor that does not fit."""
        readers: dict[str, Callable[[], QuantizedWeight]] = {
            "awq": self._awq,
            "gptq": self._gptq,
            "packed": self._packed,
            "plain": self._plain,
            "load": self._load,
        }
        return readers[self.scheme.layout]()

    def tensor(self, part: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """Returns a tensor whose shape is the first of `shapes`; the other shapes hold the same numbers."""
        name = f"{self.name}.{part}"
        if name not in self.files:
            raise ConfigError(f"the checkpoint lacks {name}, which weights of {self.scheme.text} need", field="model")
        if (shape := self.files.shape(name)) not in shapes:
            wanted = " or ".join(map(str, dict.fromkeys(shapes)))
            raise self.wrong(part, f"has shape {shape}, expected {wanted}")
        tensor = self.files.read(name)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.wrong(part, f"has dtype {str(tensor.dtype).removeprefix('torch.')}, expected {wanted}")
        return tensor.reshape(shapes[0])

    def wrong(self, part: str, problem: str) -> ConfigError:
        """Returns the error of a tensor that does not fit."""
        return ConfigError(f"{self.name}.{part} {problem} ({self.scheme.text})", field="model")

    def _scales(self, part: str, *shapes: tuple[int, ...]) -> Tensor:
        dtypes = (*_FLOATS, _POWERS) if self.scheme.kind == "fp8" else _FLOATS
        scales = self.tensor(part, shapes, dtypes).float()
        if not bool(scales.isfinite().all()):
            raise self.wrong(part, "has a scale that is not a finite number")
        return scales

    @property
    def _group(self) -> int:
        """Inputs of a group. Raises ConfigError if they do not divide the inputs of the layer."""
        size = self.scheme.group_size if self.scheme.extent == "group" else self.inputs
        if self.inputs % size:
            raise self._misfit(f"{self.inputs} inputs are not whole groups of {size}")
        return size

    def _whole_words(self, count: int, what: str) -> int:
        """Returns the number of words for `count` numbers."""
        in_word = 8 if self.scheme.kind == "int4" else 4
        if count % in_word:
            raise self._misfit(f"{count} {what} are not whole words of {in_word}")
        return count // in_word

    def _misfit(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.name} cannot be quantised as {self.scheme.text}: {problem}", field="model")

    def _unpack(self, words: Tensor) -> Tensor:
        """Returns the numbers of words [..., n] as uint8 [..., n * numbers per word]."""
        octets = words.contiguous().view(torch.uint8)
        if self.scheme.kind == "int8":
            return octets
        return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)

    def _load(self) -> QuantizedWeight:
        return quantize(self.tensor("weight", ((self.outputs, self.inputs),), _FLOATS), self.scheme)

    def _awq(self) -> QuantizedWeight:
        outputs, inputs, size = self.outputs, self.inputs, self._group
        words, order = self._whole_words(outputs, "outputs"), torch.tensor(_AWQ_ORDER)
        self._whole_words(inputs, "inputs")
        order = (torch.arange(0, outputs, 8)[:, None] + order).flatten()
        packed = self.tensor("qweight", ((inputs, words),), _WORDS)
        numbers = self._unpack(packed).t()[order.to(packed.device)]
        scales = self._scales("scales", (inputs // size, outputs)).t().contiguous()
        zeros = self._unpack(self.tensor("qzeros", ((inputs // size, words),), _WORDS)).t()[order.to(packed.device)]
        return self._integers(numbers, scales, zeros, None)

    def _gptq(self) -> QuantizedWeight:
        outputs, inputs, size = self.outputs, self.inputs, self._group
        rows, words, groups = self._whole_words(inputs, "inputs"), self._whole_words(outputs, "outputs"), inputs // size
        packed = self.tensor("qweight", ((rows, outputs),), _WORDS)
        numbers = self._unpack(packed.t())
        scales = self._scales("scales", (groups, outputs)).t().contiguous()
        stored = self._unpack(self.tensor("qzeros", ((groups, words),), _WORDS)).t()
        # The sum stays within its number: a zero of 0 is stored as the largest number.
        zeros = (stored + self.scheme.zero_shift) & (15 if self.scheme.kind == "int4" else 255)
        return self._integers(numbers, scales, zeros, self._group_index("g_idx"))

    def _packed(self) -> QuantizedWeight:
        outputs, inputs, size = self.outputs, self.inputs, self._group
        packed = self.tensor("weight_packed", ((outputs, self._whole_words(inputs, "inputs")),), _WORDS)
        if f"{self.name}.weight_shape" in self.files:
            shape = self.tensor("weight_shape", ((2,),), (torch.int64, torch.int32)).tolist()
            if shape != [outputs, inputs]:
                raise self.wrong("weight_shape", f"is {shape}, expected {[outputs, inputs]}")
        groups = inputs // size
        scales = self._scales("weight_scale", (outputs, groups))
        zeros = None
        if not self.scheme.symmetric:
            words = self._whole_words(outputs, "outputs")
            zeros = self._unpack(self.tensor("weight_zero_point", ((words, groups),), _WORDS).t()).t()
        index = self._group_index("weight_g_idx") if self.scheme.ordered else None
        return self._integers(self._unpack(packed), scales, zeros, index)

    def _integers(self, numbers: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None) -> QuantizedWeight:
        """Makes a weight of unsigned numbers [N, K], scales [N, G] and unsigned zeros [N, G] (None: the middle)."""
        if order is not None:
            numbers = numbers[:, order]
        middle = 8 if self.scheme.kind == "int4" else 128
        if zeros is not None and bool((zeros == middle).all()):
            zeros = None
        if self.scheme.kind == "int4":
            numbers = pack_nibbles(numbers)
        else:
            numbers = (numbers ^ 128).contiguous().view(torch.int8)  # the number less 128, in two's complement
            zeros = None if zeros is None else (zeros ^ 128).contiguous().view(torch.int8)
        zeros = None if zeros is None else zeros.contiguous()
        return QuantizedWeight(self.scheme.kind, numbers, scales, zeros, order, group_size=self._group)

    def _group_index(self, part: str) -> Tensor | None:
        """Returns the inputs in the order of their groups, int64 [K]. None: they are in this order already."""
        index = self.tensor(part, ((self.inputs,),), (torch.int32, torch.int64)).long()
        if bool((index == -1).all()):  # a tensor that its writer has allocated and not used
            return None
        groups = self.inputs // self._group
        if not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise self.wrong(
                part, f"has groups from {int(index.min())} to {int(index.max())}, expected 0 to {groups - 1}"
            )
        if bool((index.bincount(minlength=groups) != self._group).any()):
            raise self.wrong(part, f"has groups that have not {self._group} inputs each")
        order = index.argsort(stable=True)
        return None if bool((order[1:] > order[:-1]).all()) else order

    def _plain(self) -> QuantizedWeight:
        outputs, inputs, scheme = self.outputs, self.inputs, self.scheme
        dtype = torch.float8_e4m3fn if scheme.kind == "fp8" else torch.int8
        numbers = self.tensor("weight", ((outputs, inputs),), (dtype,))
        if scheme.kind == "fp8" and bool(numbers.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).any()):
            raise self.wrong("weight", "has a number that is NaN")
        block, size = scheme.extent == "block", inputs
        if block:
            size = BLOCK
            scales = self._scales(scheme.scale_name, (-(-outputs // BLOCK), -(-inputs // BLOCK)))
        elif scheme.extent == "tensor":
            scales = self._scales(scheme.scale_name, (1, 1), (1,), ()).expand(outputs, 1).contiguous()
        else:
            scales = self._scales(scheme.scale_name, (outputs, 1), (outputs,))
        if f"{self.name}.weight_zero_point" in self.files:
            zeros = self.tensor(
                "weight_zero_point", (tuple(self.files.shape(f"{self.name}.weight_zero_point")),), (torch.int8,)
            )
            if bool(zeros.any()):
                raise self.wrong("weight_zero_point", "is not zero, although the weights are symmetric")
        inputs_scale = None
        if scheme.activations == "static":
            inputs_scale = self._scales("input_scale", (), (1,), (1, 1))
            if not float(inputs_scale) > 0:
                raise self.wrong("input_scale", f"is {float(inputs_scale)}, a positive number is needed")
        return QuantizedWeight(
            scheme.kind,
            numbers,
            scales,
            block=block,
            activations=scheme.activations,
            input_scale=inputs_scale,
            group_size=size,
        )
