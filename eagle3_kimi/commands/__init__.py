"""Commands of `eagle3-kimi` that come in groups; heavy imports stay inside them."""
