"""Candidates for the tile of split-KV attention, and the search that times them.

The search has two stages. The first times every tile with several numbers of shares. The second varies prefetch,
the launch after the merge and the shares of the best ones. Worker processes compile all kernels first.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.kernels.paged_decode import DecodeTile

WORKERS = 12
BEST = 4  # How many results of the first stage the second one varies.
SHOWN = 8  # Rows of a printed table.
PREFETCHES = (8, 16)


@dataclass(frozen=True)
class Candidate:
    tile: DecodeTile
    shares: int


@dataclass(frozen=True)
class Result:
    candidate: Candidate
    seconds: float
    error: float

    def row(self, moved: float, copy_gb_s: float) -> str:
        tile, share = self.candidate.tile, moved / copy_gb_s / 1e9 / self.seconds
        kind = "warp" if tile.per_warp else "block"
        shape = f"{kind:<5} {tile.keys:>4} keys {tile.stages:>2} stages {tile.warps} warps {tile.max_registers or '-':>4} regs"
        rest = f"{'early' if tile.early else 'late '} prefetch {tile.prefetch:>2} {self.candidate.shares:>4} shares"
        return f"  {self.seconds * 1e6:8.2f} us {share:6.3f}  {shape} {rest}  {self.error:.1e}"


def _per_warp(*shapes: tuple[int, int, int, int | None]) -> list[DecodeTile]:
    return [DecodeTile(keys, stages, warps, True, max_registers=regs) for keys, stages, warps, regs in shapes]


#: (fp8, several tokens) -> tiles. The first is today's.
TILES = {
    (True, False): [
        DecodeTile(128, 6),
        *_per_warp(
            (64, 4, 2, None), (64, 6, 2, None), (64, 8, 2, None), (64, 4, 2, 168), (64, 6, 2, 168), (64, 6, 2, 128),
            (128, 4, 4, None), (128, 6, 4, None), (128, 6, 4, 168), (128, 4, 4, 128), (32, 6, 1, 168),
            (128, 6, 2, None), (128, 4, 2, None), (256, 4, 4, None),
        ),
    ],
    (False, False): [
        DecodeTile(64, 6),
        *_per_warp((64, 4, 2, None), (64, 6, 2, None), (64, 4, 2, 168), (64, 6, 4, None), (128, 4, 4, None)),
    ],
    (True, True): [DecodeTile(128, 6), *_per_warp((128, 6, 4, None), (64, 6, 2, None), (128, 4, 4, None))],
    (False, True): [DecodeTile(128, 4), *_per_warp((128, 4, 4, None), (64, 4, 2, None))],
}  # fmt: skip


def variants(tile: DecodeTile) -> list[DecodeTile]:
    """Returns the tile with several ways to start early."""
    return [tile, replace(tile, early=True), *(replace(tile, early=True, prefetch=blocks) for blocks in PREFETCHES)]


def first_stage(fp8: bool, several: bool, sequences: int) -> list[Candidate]:
    shares = (128, 256, 512) if sequences == 1 else (256, 512) if several else (256, 384, 512, 768)
    tiles = TILES[fp8, several]
    today = Candidate(tiles[0], 128 if sequences == 1 else 256)
    return [today, *(Candidate(tile, count) for tile in tiles for count in shares)]


def second_stage(best: list[Result], sequences: int) -> list[Candidate]:
    found: dict[Candidate, None] = {}
    for result in best:
        shares = result.candidate.shares
        for tile in variants(result.candidate.tile):
            found[Candidate(tile, shares)] = None
        for count in (64, 264, 384) if sequences == 1 else (shares + shares // 32,):
            found[Candidate(result.candidate.tile, count)] = None
    return list(found)


def search(
    name: str, measure: Callable[[Candidate], Result], kind: tuple[bool, bool, int], moved: float, copy_gb_s: float
) -> list[Result]:
    """Times the candidates of both stages and prints the fastest. A candidate that does not compile is reported."""
    results: dict[Candidate, Result] = {}

    def run(candidates: list[Candidate]) -> None:
        for candidate in candidates:
            if candidate not in results:
                try:
                    results[candidate] = measure(candidate)
                except Exception as error:  # for example too much shared memory: the search goes on
                    print(f"  {name} {candidate}: {str(error)[:160]}", flush=True)

    first = first_stage(*kind)
    run(first)
    ranking = sorted(results.values(), key=lambda result: result.seconds)
    run(second_stage(ranking[:BEST], kind[2]))
    ranking = sorted(results.values(), key=lambda result: result.seconds)
    print(f"{name}: {len(ranking)} candidates, today's is marked", flush=True)
    shown = ranking[:SHOWN] + [result for result in ranking[SHOWN:] if result.candidate == first[0]]
    for result in shown:
        print(result.row(moved, copy_gb_s) + (" <- today" if result.candidate == first[0] else ""), flush=True)
    return ranking


def compile_in_parallel(program: str) -> None:
    """Runs WORKERS processes of the benchmark that only compile, and waits for all."""
    workers = [
        subprocess.Popen([sys.executable, program, "--tune", "--compile", str(worker)]) for worker in range(WORKERS)
    ]
    for worker in workers:
        worker.wait()
