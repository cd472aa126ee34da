"""The pages, and what makes them: `docs.build`, `docs.figures`, `docs.exercises`."""
