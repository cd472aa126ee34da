"""The views of explain.py: document.py is the data, page.py and text.py show it."""
