"""What is wrong with a phase, found before or while it is set up."""


class RecipeError(ValueError):
    """A phase cannot run as configured; the message names the key and the mend."""
