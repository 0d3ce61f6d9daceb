"""The routes of Anthropic's Messages API, as the `anthropic` SDK and agents made for it call them."""
