"""The synthetic driving world: scenes, expert, language, renderer."""
