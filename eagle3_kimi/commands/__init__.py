"""Commands of `eagle3-kimi`, one module a group; heavy imports stay inside the functions."""
