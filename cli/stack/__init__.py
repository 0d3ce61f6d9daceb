"""A whole Baton on one machine: which processes it has, who keeps them running, what a person sees of them."""
