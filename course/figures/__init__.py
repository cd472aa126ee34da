"""Figures of the course, each computed by this project's own code."""
