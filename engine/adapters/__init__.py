"""LoRA adapters over one base model: files, host and device memory, and the products of a step.

    peft.py   reads a directory in PEFT's format         packed.py  an adapter in one piece of memory
    sites.py  the products of a decoder that can have adapters
    slots.py  adapters by name, and their slots on the device
    rows.py   which rows of a step use which slot
    ops.py    the operations of a decoder layer with adapters, over any base
    torch_rows.py and triton_rows.py  compute the rows of a step

The identity of an adapter is its digest: a hash of its effective weights. Block hashes contain it, so another adapter
under the same name shares no KV with the old one.
"""
