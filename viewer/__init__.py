"""The data (document.py) and views (page.py, text.py) of explain.py."""
