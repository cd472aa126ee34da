"""A course on attention: pages (Markdown), figures and exercises."""
