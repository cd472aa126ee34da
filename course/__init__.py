"""A course on attention: pages (Markdown), figures, exercises and a lab of variants."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
