"""One trainer for every recipe: config, phases, the private step, and the engine that shards it."""
