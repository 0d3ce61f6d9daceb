"""Operations of steps with one token a sequence on a CPU, compiled by numba (extra `cpu`). torch does the same."""
