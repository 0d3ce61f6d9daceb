"""The way of a request through the pods: attempts of a prefill and a decode, and the queue of their tokens."""
