"""Candidates for the tile of split-KV attention and the search that times them. Worker processes compile first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.kernels.paged_decode import DecodeTile

WORKERS = 12
SHOWN = 9  # Rows of a printed table.


@dataclass(frozen=True)
class TimedTile:
    tile: DecodeTile
    seconds: float
    error: float

    def row(self, moved: float, copy_gb_s: float) -> str:
        tile, share = self.tile, moved / copy_gb_s / 1e9 / self.seconds
        kind = "warp" if tile.per_warp else "block"
        shape = f"{kind:<5} {tile.keys:>4} keys {tile.stages:>2} stages {tile.warps} warps {tile.shares:.2f} shares"
        return f"  {self.seconds * 1e6:8.2f} us {share:6.3f}  {shape}  {self.error:.1e}"


def _per_warp(*shapes: tuple[int, int, int]) -> list[DecodeTile]:
    return [DecodeTile(keys, stages, warps, True) for keys, stages, warps in shapes]


#: (fp8, several tokens) -> tiles.
TILES = {
    (True, False): [
        DecodeTile(128, 6),
        *_per_warp((64, 4, 2), (64, 6, 2), (64, 8, 2), (64, 6, 4), (128, 4, 4), (128, 6, 4), (128, 4, 2), (32, 6, 1)),
    ],
    (False, False): [DecodeTile(64, 6), *_per_warp((64, 4, 2), (64, 6, 2), (64, 6, 4), (128, 4, 4))],
    (True, True): [DecodeTile(128, 6), *_per_warp((128, 6, 4), (64, 6, 2))],
    (False, True): [DecodeTile(128, 4), *_per_warp((128, 4, 4))],
}


def search(
    name: str, measure: Callable[[DecodeTile], TimedTile], kind: tuple[bool, bool], moved: float, copy_gb_s: float
) -> None:
    """Times the candidates and prints the fastest. A candidate that does not compile is reported."""
    results: list[TimedTile] = []
    for tile in TILES[kind]:
        for shares in (0.5, 1.0, 1.5, 2.0):
            try:
                results.append(measure(replace(tile, shares=shares)))
            except Exception as error:  # for example too much shared memory: the search goes on
                print(f"  {name} {tile}: {str(error)[:160]}", flush=True)
    results.sort(key=lambda result: result.seconds)
    print(f"{name}: {len(results)} candidates", flush=True)
    for result in results[:SHOWN]:
        print(result.row(moved, copy_gb_s), flush=True)


def compile_in_parallel(program: str) -> None:
    """Runs WORKERS processes of the benchmark that only compile, and waits for all."""
    workers = [
        subprocess.Popen([sys.executable, program, "--tune", "--compile", str(worker)]) for worker in range(WORKERS)
    ]
    for worker in workers:
        worker.wait()
