"""What no recipe uses: studies and tools that build on everything else and may leave without it."""
