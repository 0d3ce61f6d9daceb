"""What every part of Baton shares: types, errors, KV layout, hashes, the prefix index, RPC plumbing. Never torch."""
