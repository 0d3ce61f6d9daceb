"""The global prefix index in Redis: a hint which pod holds which blocks, and how busy each is.

Pods write (PodIndex, only their own entries), gateways read and book (IndexReader). Neither fails a request when Redis
is away. Keys and scripts: common/index_store.py and common/lua.
"""

from common.index_identity import mint_generation
from common.index_pod import PodIndex
from common.index_reader import IndexReader
from common.index_records import Candidate, Held, PodLoad, PodRecord, PodStatus, Reserved, Tier

__all__ = [
    "Candidate",
    "Held",
    "IndexReader",
    "PodIndex",
    "PodLoad",
    "PodRecord",
    "PodStatus",
    "Reserved",
    "Tier",
    "mint_generation",
]
