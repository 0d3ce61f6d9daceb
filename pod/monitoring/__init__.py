"""What a pod measures of itself: metrics, rates for routing, the GPU, and loops that are stuck."""
