"""Runs Gluon kernels for Hopper on the CPU, one program after the other, in plain torch. Layouts are ignored.

The partitions of a program are threads. Asynchronous operations take effect as late as they may. A copy to shared
memory fills its target with NaN at once and writes it when its barrier completes. A product reads shared memory when
the kernel waits for it. So a result is NaN if a kernel reads a tile too early, or overwrites it too early. This finds
no races between warps of a partition.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

WAIT_S = 20.0
COPY_THREADS = 128  # Of the partition that copies.
DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


@dataclass
class Pointer:
    """Addresses of numbers: a flat storage and an offset for each."""

    storage: Tensor
    offset: Tensor

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.storage, self.offset + offset)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.storage.dtype)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Returns the offsets and the mask, both with the shape of the result."""
        ok = torch.as_tensor(True if mask is None else mask)
        offset, ok = torch.broadcast_tensors(self.offset.long(), ok)
        return torch.where(ok, offset, 0), ok


@dataclass
class Shared:
    """A view of shared memory."""

    data: Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def load(self, _: Any) -> Tensor:
        return self.data.clone()

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.data.dtype
        self.data.copy_(value.expand(self.data.shape))


@dataclass
class Product:
    """An asynchronous product. Its value is there when the kernel has waited for it."""

    left: Shared | Tensor
    right: Shared
    sums: Any
    use_acc: bool
    value: Tensor | None = None

    def finish(self) -> None:
        left = self.left.data if isinstance(self.left, Shared) else self.left
        product = left.float() @ self.right.data.float()
        sums = self.sums.value if isinstance(self.sums, Product) else self.sums
        assert sums.shape == product.shape
        self.value = product + sums if self.use_acc else product


class Barrier:
    """An mbarrier in shared memory."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int = 1) -> None:
        with self.changed:
            assert 0 < count <= self.missing
            self.missing -= count
            if not self.missing:
                self.missing, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        """Waits until the phase of this parity has completed."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != int(parity), WAIT_S), "a barrier did not complete"


@dataclass
class Barriers:
    """Several barriers."""

    barriers: list[Barrier]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class Pending(threading.local):
    """What the partition of this thread has started, but not waited for."""

    def __init__(self) -> None:
        self.writes: list[tuple[Tensor, Tensor]] = []
        self.products: list[Product] = []


@dataclass
class Program:
    """The state of one program, and the functions that Gluon has in its modules."""

    ids: tuple[int, ...]
    grid: tuple[int, ...]
    pending: Pending = field(default_factory=Pending)

    def async_load(self, target: Shared, source: Pointer, mask: Any = None) -> None:
        value = load(source, mask=mask)
        assert value.shape == target.data.shape
        target.data.fill_(float("nan"))
        self.pending.writes.append((target.data, value))

    def arrive_after_copies(self, barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        for target, value in self.pending.writes:
            target.copy_(value)
        self.pending.writes = []
        barrier.arrive(COPY_THREADS)

    def product(self, left: Any, right: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        self.pending.products.append(Product(left, right, acc, use_acc))
        return self.pending.products[-1]

    def wait_products(self, pending: int = 0, deps: Any = ()) -> Any:
        while len(self.pending.products) > pending:
            self.pending.products.pop(0).finish()
        values = [dep.value if isinstance(dep, Product) else dep for dep in deps]
        assert all(value is not None for value in values)
        return values[0] if len(values) == 1 else tuple(values)

    def specialize(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        problems: list[BaseException] = []

        def run(partition: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                partition(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))  # += changes tensors
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=run, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        if problems:
            raise problems[0]

    def language(self) -> SimpleNamespace:
        """Returns what a kernel finds in `gl`."""
        layouts = ("NVMMADistributed", "NVMMAShared", "SwizzledShared", "Blocked", "Slice", "DotOperand")
        return SimpleNamespace(
            **dict.fromkeys((f"{name}Layout" for name in layouts), lambda *sizes: sizes),
            **DTYPES,
            constexpr=lambda value: value,
            program_id=lambda axis: torch.tensor(self.ids[axis]),
            num_programs=lambda axis: self.grid[axis],
            allocate_shared_memory=allocate,
            static_range=range,
            warp_specialize=self.specialize,
            arange=lambda start, end, _: torch.arange(start, end, dtype=torch.int32),
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
            load=load,
            store=store,
            where=lambda ok, a, b: torch.where(torch.as_tensor(ok), a, b),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            exp2=torch.exp2,
            log2=torch.log2,
            expand_dims=lambda x, axis: x.unsqueeze(axis),
            reshape=lambda x, shape: x.reshape(shape),
            convert_layout=lambda x, *_, **__: x,
            multiple_of=lambda x, number: x if bool((x % number == 0).all()) else pytest.fail("not a multiple"),
        )


def allocate(dtype: torch.dtype, shape: list[int], _: Any) -> Shared | Barrier | Barriers:
    """Returns shared memory of NaN. int64: barriers."""
    if dtype != torch.int64:
        return Shared(torch.full(shape, float("nan"), dtype=dtype))
    return Barrier() if len(shape) == 1 else Barriers([Barrier() for _ in range(shape[0])])


def load(source: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    places, ok = source.places(mask)
    return torch.where(ok, source.storage[places], torch.tensor(other).to(source.storage.dtype))


def store(target: Pointer, value: Tensor, mask: Any = None) -> None:
    places, ok = target.places(mask)
    target.storage[places[ok]] = value.expand(places.shape)[ok].to(target.storage.dtype)


@dataclass
class EagerKernel:
    """Takes the place of a kernel in its module."""

    module: ModuleType
    kernel: Any
    monkeypatch: pytest.MonkeyPatch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            names = inspect.signature(self.kernel.fn).parameters
            options = {name: value for name, value in options.items() if name in names}
            pointers = [
                Pointer(torch.as_strided(arg, (arg.untyped_storage().nbytes() // arg.element_size(),), (1,), 0),
                        torch.tensor(arg.storage_offset())) if isinstance(arg, Tensor) else arg
                for arg in args
            ]  # fmt: skip
            for ids in itertools.product(*map(range, grid)):
                self.enter(Program(ids, grid))
                self.kernel.fn(*pointers, **options)

        return launch

    def enter(self, program: Program) -> None:
        """Gives the module of the kernel the functions of a program."""
        barriers = {name: getattr(Barrier, name) for name in ("init", "arrive", "wait")}
        for name, value in {
            "gl": program.language(),
            "async_copy": SimpleNamespace(mbarrier_arrive=program.arrive_after_copies),
            "mbarrier": SimpleNamespace(**barriers, MBarrierLayout=tuple),
            "_async_load": program.async_load,
            "warpgroup_mma": program.product,
            "warpgroup_mma_wait": program.wait_products,
            "fence_async_shared": lambda: None,
            "_barrier": lambda: None,
            "_wait_for_previous": lambda _: None,
        }.items():
            self.monkeypatch.setattr(self.module, name, value)


def run_eagerly(module: ModuleType, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernels of a module and its other Gluon functions for the rest of a test."""
    for name, value in list(vars(module).items()):
        if name in kernels:
            monkeypatch.setattr(module, name, EagerKernel(module, value, monkeypatch))
        elif getattr(value, "is_gluon", lambda: False)():
            monkeypatch.setattr(module, name, value.fn)
        elif type(value).__name__ == "constexpr":
            monkeypatch.setattr(module, name, value.value)
