"""The data (document.py) and views (page.py) of explain.py."""
