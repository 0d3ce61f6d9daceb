"""Code that all parts of Baton share: types, errors, KV layout, block hashes, settings, RPC. It never imports torch."""
